"""Programmatic rewards as a user runs them: one command, from a file to the report."""

import json
from pathlib import Path

import pytest

from tests.commands import ROOT, run_command

SCORE = """
def check(prompts, completions, answer, **columns):
    return [float(right in text) for text, right in zip(completions, answer)]
"""

SHORT = [
    *("--sft.max_steps", "3", "--ppo.max_steps", "2", "--ppo.rollout_size", "16"),
    *("--ppo.batch_size", "8", "--ppo.max_new_tokens", "4", "--ppo.max_prompt_length", "64"),
    *("--ppo.advantage", "grpo", "--ppo.group_size", "4", "--ppo.data.max_eval_rows", "8"),
    *("--sft.data.max_eval_rows", "8", "--max-length", "80"),
]
"""A run of seconds."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a reward function and rows of GSM8K's schema."""
    (tmp_path / "score.py").write_text(SCORE)
    rows = [
        {"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
        for n in range(100)
    ]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.jobs
def test_reward_function_alone_runs_from_rows_to_report(directory: Path) -> None:
    options = ("--data-path", "gsm8k.jsonl", "--output-dir", "out", *SHORT)
    rewards = ("--reward-function", "score.py:check", "--reward", "length:2")
    result = run_command(str(ROOT / "train.py"), *options, *rewards, cwd=directory)

    assert result.returncode == 0, result.stderr
    out = directory / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"].keys() == {"step1_sft", "step3_ppo"}
    figures = summary["steps"]["step3_ppo"]["eval"]
    assert figures.keys() >= {"reward_before", "reward_after", "reward_length_after", "win_rate"}
    text = (out / "step3_ppo" / "metrics.jsonl").read_text()
    for line in [line for line in map(json.loads, text.splitlines()) if "score" in line]:
        assert line["score"] == pytest.approx(line["reward_check"] + line["reward_length"])
        assert line["reward_failures"] == 0
    assert "Reward check" in (out / "report.html").read_text()
    assert not (out / "step2_reward").exists()
    assert "is called as TRL's (prompts, completions, **columns)" in result.stderr
