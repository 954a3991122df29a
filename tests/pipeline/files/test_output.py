"""Output files of commands."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipeline.files.durable import check_writable, write_output
from pipeline.system.errors import ConfigError
from tests.sources import ROOT

KILLED = """
import resource, signal, sys
from pathlib import Path
from pipeline.files.durable import check_writable, write_output

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
write_output({Path(sys.argv[1]): "new " * 1000}, option="--output")
"""
"""The kernel kills a process that exceeds its file size limit."""


def test_process_killed_during_a_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    result = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, check=False)

    assert result.returncode == -signal.SIGXFSZ
    assert path.read_text() == "old"
    write_output({path: "new"}, option="--output")  # overwrites the partial file
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
    assert path.read_text() == "new"


def test_failure_of_one_file_changes_no_other_and_loses_no_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "a").write_text("old")
    (tmp_path / "b.partial").mkdir()

    message = r"--out .*b can't be written: Is a directory; its content is in .*/rlhf-"
    with pytest.raises(ConfigError, match=message):
        write_output({tmp_path / "a": "new", tmp_path / "b": "new"}, option="--out")

    assert (tmp_path / "a").read_text() == "old"
    assert not (tmp_path / "a.partial").exists()
    assert [path.read_text() for path in sorted(tmp_path.glob("rlhf-*/*"))] == ["new", "new"]


def test_check_writable_raises_for_unwritable_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path)  # tests may run as root
    check_writable(tmp_path / "open" / "none" / "out", option="--out")
    cause = f"can't be written: {tmp_path}"
    reasons = {"open": "is a", "file/out": rf"{cause}/file is a", "none/out": rf"{cause} is not"}
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=f"^--out {tmp_path}/{name} {reason}"):
            check_writable(tmp_path / name, option="--out")
    with pytest.raises(ConfigError, match="is also an input"):
        check_writable(tmp_path / "open/../file", "other", tmp_path / "file", option="--out")
