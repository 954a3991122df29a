"""The command line: what is in a checkpoint, and whether it is whole."""

from pathlib import Path

import pytest

from pipeline.cli.options import run_main
from pipeline.engine.checkpoint.__main__ import main
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
