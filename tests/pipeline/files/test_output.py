"""Files that a command makes for its user."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.files.durable import check_output, write_output
from pipeline.system.errors import ConfigError
from tests.sources import ROOT

KILLED = """
import resource, signal, sys
from pathlib import Path
from pipeline.files.durable import check_output, write_output

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
write_output({Path(sys.argv[1]): "new " * 1000}, option="--output")
"""
"""The kernel kills a process that writes more than it may."""


def test_a_process_that_is_killed_as_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, check=False)

    assert done.returncode == -signal.SIGXFSZ
    assert path.read_text() == "old"
    write_output({path: "new"}, option="--output")  # what was left does not stand in the way
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]
    assert path.read_text() == "new"


def test_where_the_last_of_several_files_fails_none_has_changed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "b.partial").mkdir()

    with pytest.raises(ConfigError, match=r"--out .*b can't be written: Is a directory"):
        write_output({tmp_path / "a": "new", tmp_path / "b": "new"}, option="--out")

    assert (tmp_path / "a").read_text() == "old"


def test_an_output_that_can_not_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path)  # root may write to all
    check_output(tmp_path / "open" / "none" / "out", option="--out")
    closed = f"can't be written: {tmp_path}"
    reasons = {"open": "is a", "file/out": rf"{closed}/file is a", "none/out": rf"{closed} is not"}
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=f"^--out {tmp_path}/{name} {reason}"):
            check_output(tmp_path / name, option="--out")
