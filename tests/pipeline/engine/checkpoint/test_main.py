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


@pytest.mark.parametrize("model", ["", "actor"])
def test_where_a_finished_run_has_no_checkpoints_left_its_model_is_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    (tmp_path / model).mkdir(exist_ok=True)
    (tmp_path / "result.json").write_text("{}")
    sentence = f"{root} holds no checkpoints: the run has finished, and its model is in "

    for command in ("verify", "show"):
        assert run(command, str(root)) == 0
        assert capsys.readouterr().out == f"{sentence}{tmp_path / model}\n"
    assert run("consolidate", str(root), str(tmp_path / "out")) == 2
    assert capsys.readouterr().err == f"error: {sentence}{tmp_path / model}\n"
