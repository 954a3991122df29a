"""The command line: what is in a checkpoint, and whether it is whole."""

from pathlib import Path

import pytest

from pipeline.cli.options import run_main
from pipeline.engine.checkpoint.__main__ import main
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from tests.pipeline.engine.checkpoint.saving import save

FILE = "rank-00000-of-00001.safetensors"


def run(*argv: str) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        run_main(main, argv)
    return stopped.value.code


def test_verify_ends_with_1_and_names_the_file_and_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1, 2)
    file = tmp_path / "step_00000002" / FILE
    file.write_bytes(file.read_bytes()[:-1] + b"?")

    assert run("verify", str(tmp_path)) == 1

    first, second = capsys.readouterr().out.splitlines()
    assert first == (f"step_00000002 does not verify: {file} is damaged: its CRC-32 differs")
    assert second.startswith("step_00000001 verifies")
    assert run("verify", str(file.parent)) == 1
    assert run("verify", str(tmp_path / "step_00000001")) == 0


def test_show_has_the_step_the_processes_and_the_tensors_of_each_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 3)
    checkpoint = Checkpoint.open(tmp_path / "step_00000003")

    main(["show", str(tmp_path)])

    shown = capsys.readouterr().out
    assert "step 3, saved " in shown
    assert "processes: 1" in shown
    rows = (line.split() for line in shown.splitlines())
    tensors = [int(row[1]) for row in rows if len(row) == 4 and row[1].isdigit()]
    assert sum(tensors) == len(checkpoint.keys())
