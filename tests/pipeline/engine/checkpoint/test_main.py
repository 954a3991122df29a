"""The commands that verify and consolidate a checkpoint."""

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


def test_verify_exits_with_1_and_reports_the_damaged_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1, 2)
    file = tmp_path / "step_00000002" / FILE
    file.write_bytes(file.read_bytes()[:-1] + b"?")

    assert run("verify", str(tmp_path)) == 1

    first, second = capsys.readouterr().out.splitlines()
    assert first == f"step_00000002 failed verification: {file} is damaged: CRC-32 mismatch"
    assert second.startswith("step_00000001 is intact")
    assert run("verify", str(file.parent)) == 1
    assert run("verify", str(tmp_path / "step_00000001")) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["verify"], "the following arguments are required: dir; python -m pipeline.engine"),
        (["verify", "{}/none"], "no such directory: {}/none"),
        (["verify", "{}/empty"], "{}/empty is not a checkpoint and contains none"),
        (["verify", "{}/step_00000002"], None),
        (["consolidate", "{}"], "the following arguments are required: out"),
        (["consolidate", "{}", "{}/file"], "{}/file already exists; choose a new directory"),
        (["consolidate", "{}", "{}"], "{} already exists; choose a new directory"),
        (["consolidate", "{}", "{}/empty"], "{}/step_00000001 has no"),
    ],
)
def test_invalid_arguments_print_one_sentence(
    argv: list[str], message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()

    code = run(*(word.format(tmp_path) for word in argv))

    if message is None:  # a missing step counts as damaged
        assert code == 1
    else:
        assert code == 2
        assert f"error: {message.format(tmp_path)}" in capsys.readouterr().err
