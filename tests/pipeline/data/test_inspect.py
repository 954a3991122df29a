import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.data.examples import Message
from pipeline.data.inspect import main, marked_text
from pipeline.data.resolve_format import resolve_format
from pipeline.errors import ConfigError, DataError
from tests.pipeline.data.tokenizers import KINDS

ROOT = Path(__file__).parents[3]


def write(path: Path, count: int = 10) -> str:
    rows = [
        {"prompt": f"Ask {n}", "chosen": f"Good {n}.", "rejected": f"Bad {n}."}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def inspect(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    main(argv)
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_the_marked_text_is_the_whole_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    chat = resolve_format(tokenizer, "human_assistant")
    prompt = (Message("user", "Hi there."), Message("assistant", "Hello you!"))
    encoded = chat.encode((*prompt, Message("user", "How?")), (Message("assistant", "Fine."),))

    pieces = list(marked_text(encoded, tokenizer))

    assert "".join(piece for piece, _ in pieces) == tokenizer.decode(encoded.input_ids)
    trained = [piece for piece, is_trained in pieces if is_trained]
    end = tokenizer.eos_token
    assert trained == [f" Hello you!{end}", f" Fine.{end}"]


def test_step_1_shows_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl")

    out = inspect(capsys, "--data-path", path, "--rows", "1", "--data-split", "1,0,0")

    counts = re.search(r"step 1: (\d+) training rows, (\d+) for evaluation", out)
    assert counts is not None
    assert int(counts[1]) + int(counts[2]) == 10
    assert f"{path}: uses the columns chosen, prompt, rejected" in out
    assert f"row 1: {path} line " in out
    assert "\nHuman: Ask " not in out  # the embedded tokenizer begins with <s>
    assert "<s>Human: Ask " in out
    assert out.count("Assistant:[[ Good ") == 1
    assert ".</s>]]" in out
    assert "row 2" not in out
    assert "trained share" in out


def test_step_2_shows_both_responses_and_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "rows.jsonl")

    out = inspect(capsys, "--data-path", path, "--step", "2", "--rows", "1", "--token-ids")

    assert "chosen as " in out
    assert "rejected as " in out
    assert "[[ Bad " in out
    assert out.count("  [1, ") == 2  # both begin with <s>


def test_step_3_shows_the_prompt_up_to_the_generation_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "rows.jsonl")

    out = inspect(capsys, "--data-path", path, "--step", "3", "--rows", "1", "--format", "chatml")

    assert "<|im_end|>\n<|im_start|>assistant\n" in out
    assert "0 trained" in out
    assert "a response ends with <|im_end|>" in out


def test_what_is_cut_off_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl")

    out = inspect(capsys, "--data-path", path, "--rows", "1", "--max-length", "5")

    assert "as 5 tokens, 0 trained" in out
    assert "cut off:" in out
    assert "[[" not in out


def test_fields_are_read_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": f"Ask {n}", "a": "Good."}) + "\n" for n in range(9)))

    as_json = inspect(
        capsys, "--data-path", str(path), "--fields", '{"prompt": "q", "response": "a"}'
    )
    as_words = inspect(capsys, "--data-path", str(path), "--fields", "prompt=q", "response=a")

    assert "[[ Good.</s>]]" in as_json
    assert as_words == as_json


def test_wrong_input_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="there is no option --nope"):
        main(["--nope", "1"])
    with pytest.raises(DataError, match="no such file or directory"):
        main(["--data-path", "nope.jsonl"])


def test_the_command_ends_as_commands_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline.data.inspect"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words],
            check=False,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    asked = run("--help")
    wrong = run("--data-path", "nope.jsonl")

    assert (asked.returncode, asked.stderr) == (0, "")
    assert "--token-ids" in asked.stdout
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: data path nope.jsonl: there is no such file or directory\n"
