"""The command line: what is in a checkpoint, and whether it is whole."""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from pipeline.cli import run_main
from pipeline.engine.checkpoint.__main__ import main
from pipeline.engine.checkpoint.format import Fragment
from tests.pipeline.engine.checkpoint.saving import save, writer

FILE = "rank-00000-of-00001.safetensors"


def run(*argv: str) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        run_main(main, argv)
    return stopped.value.code


def test_verify_says_one_line_for_each_whole_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1, 2)

    assert run("verify", str(tmp_path)) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" in ")[0] for line in lines] == [
        "step_00000002 verifies: 2 tensors, 40,175 bytes",
        "step_00000001 verifies: 2 tensors, 40,175 bytes",
    ]


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


def test_show_counts_tensors_elements_and_bytes_by_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = writer(tmp_path)
    saver.save_base("base-1a", [Fragment("actor/frozen/w", 0, torch.zeros(8))])
    pieces = [
        Fragment("actor/exp_avg/a", 0, torch.zeros(1000)),
        Fragment("actor/exp_avg/b", 0, torch.zeros(500)),
        Fragment("rng/torch", 0, torch.zeros(16, dtype=torch.uint8)),
    ]
    saver.save(7, pieces, {"step": 7, "words": ["long"] * 20}, base="base-1a")
    saver.close()

    assert run("show", str(tmp_path / "step_00000007")) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(tmp_path / "step_00000007")
    assert lines[1].startswith("  step 7, saved 20")
    assert lines[1].endswith("+00:00, processes: 1")
    assert f"torch {version('torch')}" in lines[2]
    assert lines[3] == "  frozen weights in base-1a"
    assert [line.split() for line in lines[4:8]] == [
        ["kind", "tensors", "elements", "bytes"],
        ["actor/exp_avg", "2", "1,500", "6,000"],
        ["actor/frozen", "1", "8", "32"],
        ["rng", "1", "16", "16"],
    ]
    assert lines[8] == "  step: 7"
    assert lines[9].startswith('  words: ["long", "long",')
    assert lines[9].endswith(" ...")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["verify"], "error: usage: python -m pipeline.engine.checkpoint verify DIR\n"),
        (["show", "nowhere"], "error: there is no directory nowhere\n"),
    ],
)
def test_wrong_words_are_a_sentence_and_exit_code_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 2
    assert capsys.readouterr().err == sentence


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
