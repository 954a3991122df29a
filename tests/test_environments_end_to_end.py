"""The documented environments, from a file of rows to the report with one command."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, run_command

SHORT = [
    *("--sft.max_steps", "20", "--ppo.max_steps", "2", "--ppo.rollout_size", "16"),
    *("--ppo.batch_size", "8", "--ppo.max_new_tokens", "24", "--ppo.max_prompt_length", "64"),
    *("--ppo.data.max_eval_rows", "8", "--sft.data.max_eval_rows", "8", "--max-length", "120"),
    *("--output-dir", "out", "--data-path", "rows"),
]
"""A run of seconds."""


def read_rollout_metrics(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "out" / "step3_ppo" / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if "turns" in line]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("calculator", "options"),
    [("false", ("game.py:GuessingGame",)), ("true", ("calculator", "--reward", "math"))],
    ids=("game", "calculator"),
)
def test_documented_environment_runs_from_rows_to_report(
    tmp_path: Path, calculator: str, options: tuple[str, ...]
) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    (tmp_path / "game.py").write_text(page.split("```python\n")[1].split("```")[0])
    rows = ("-m", "pipeline.demo.arithmetic", "--calculator", calculator, "--out", "rows")
    written = run_command(*rows, cwd=tmp_path)
    assert written.returncode == 0, written.stderr

    command = (str(ROOT / "train.py"), "--method", "grpo", "--environment", *options)
    result = run_command(*command, *SHORT, cwd=tmp_path)

    assert result.returncode == 0, result.stderr
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"].keys() == {"step1_sft", "step3_ppo"}
    assert {"reward_before", "reward_after"} <= summary["steps"]["step3_ppo"]["eval"].keys()
    assert len(read_rollout_metrics(tmp_path)) == 2
    for line in read_rollout_metrics(tmp_path):
        assert line["reward_failures"] == 0.0
        assert line["ended_by_failure"] == 0.0
        assert line["turns"] > 1.0 or calculator == "true"
    rows_shown = json.loads((out / "step3_ppo" / "samples.json").read_text())["rows"]
    assert rows_shown[0]["prompt"][0]["role"] == "user"
    assert (out / "report.html").is_file()
