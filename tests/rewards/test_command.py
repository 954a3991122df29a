"""`python -m rewards`, as a user runs it."""

import json
from pathlib import Path

import pytest

from pipeline.system.errors import ConfigError
from rewards.config import read_spec
from tests.commands import run_command
from tests.sources import ROOT


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows in GSM8K's format: solutions that end in the answer; the third answer isn't a number."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    answers = ["3 * 6 = 18\n#### 18", "#### 1,000", "either of them", "#### 7"]
    lines = [json.dumps({"question": "How many?", "answer": answer}) for answer in answers]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_command_scores_the_answers_of_the_rows(rows: Path) -> None:
    (rows / "mine.py").write_text(
        "def score(solution_str, ground_truth):\n"
        "    print('this is not an output')\n"
        "    return 2 / ('18' in solution_str)\n"
    )

    options = ("--data-path", "rows.jsonl", "--reward", "math", "--reward", "mine.py:score")
    result = run_command("-m", "rewards", *options, cwd=rows)

    assert result.returncode == 1  # since a source failed
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "rewards.score: mine.py:score is called as"
        " verl's (data_source, solution_str, ground_truth, extra_info)"
    )
    assert lines[1].startswith("rows.jsonl: 4 responses, ")
    assert [line.split() for line in lines[3:6]] == [
        ["source", "=", "1", "=", "0", "None", "failed", "mean"],
        ["math", "75.0%", "0.0%", "25.0%", "0.0%", "1.000"],
        ["score", "0.0%", "0.0%", "0.0%", "75.0%", "2.000"],
    ]
    assert lines[6] == "math: first None: rows.jsonl line 3"
    assert lines[7] == (
        "score: first failed: rows.jsonl line 2:"
        " the call raised ZeroDivisionError: division by zero"
    )
    assert "this is not an output" in result.stderr


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{kind: math, colum: a}", "there is no setting rewards.math.colum"),
        ("{kind: length, max_tokens: a}", "rewards.length.max_tokens must be an integer"),
        ("{weight: 3}", r"kind is missing \(available: code, environment, exact, function"),
        ("{kind: length", "is not a mapping of settings"),
        ("judge:x", "rewards.judge.model is missing"),
    ],
)
def test_invalid_source_spec_is_rejected(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(spec)
