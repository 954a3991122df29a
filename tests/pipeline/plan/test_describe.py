import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pipeline.cli.options import parse_step
from pipeline.plan.request import parse_request
from pipeline.plan.resolve import step_configs
from pipeline.settings.fields import to_options
from tests.commands import run_command
from tests.pipeline.stages import THREE_STEPS
from tests.sources import ROOT


def dry_run(cwd: Path, *argv: str) -> str:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = run_command(str(ROOT / "train.py"), "--dry-run", *argv, cwd=cwd, env=env)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--lora", "8", "--data-path", "a b.jsonl", "c.jsonl:2", "--fields", "prompt=q"),
        ("--sft.model.optim.moments", "bf16", "--sft.patience", "3", "--epochs", "2"),
        ("--sft.save_every", "null", "--sft.eval_every", "5", "--reward.margin"),
        ("--sft.model.optim.betas", "0.8,0.9", "--ppo.trackers", "tensorboard", "wandb"),
        ("--method", "gspo", "--ppo.clip", "0.2", "--ppo.baseline", "none"),
        ("--data-path", '["x", "[y]", "--z"]', "--sft.model.lora", "--ppo.score_clip", "null"),
    ],
)
def test_settings_converted_to_options_parse_to_the_same_settings(argv: tuple[str, ...]) -> None:
    parsed = parse_request(["--sft.eval_every", "2", *argv], THREE_STEPS)
    for config in step_configs(parsed, THREE_STEPS).values():
        words = [word for name, values in to_options(config) for word in (f"--{name}", *values)]

        assert parse_step(type(config), words) == config


@pytest.mark.jobs
def test_dry_run_prints_rows_steps_tokens_and_time_of_each_step(tmp_path: Path) -> None:
    printed = dry_run(tmp_path)

    assert "  rows       32,000 to train on, 256 held out" in printed
    assert "  steps      500 optimizer steps of 64 rows: 1 pass over the rows" in printed
    assert "  steps      24 iterations of 128 rows: 0.51 passes over the rows" in printed
    assert len(re.findall(r"^  tokens +\d+ per row, \S+ \w+ in all$", printed, re.MULTILINE)) == 3
    assert len(re.findall(r"^  time       about .* \(.* to .*\)$", printed, re.MULTILINE)) == 3
    assert re.search(r"^About .* in all \(.* to .*\)\.\nEstimated from 35%", printed, re.MULTILINE)
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 100
    assert list(tmp_path.iterdir()) == []


@pytest.mark.jobs
def test_commands_printed_by_a_dry_run_can_be_executed(tmp_path: Path) -> None:
    rows = [{"prompt": f"Is {n} odd?", "response": "Yes." if n % 2 else "No."} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = dry_run(
        tmp_path,
        *("--step", "1", "--data-path", "rows.jsonl", "--sft.max_steps", "1", "--output-dir", "o"),
    )
    commands = printed.partition("Equivalent")[2].partition("\n")[2].partition("Memory of")[0]

    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        commands, shell=True, cwd=tmp_path, env=environment, capture_output=True, check=False
    )

    assert shlex.split(commands)[3:5] == ["-m", "step1_sft.train"]
    assert result.returncode == 0
    assert (tmp_path / "o" / "step1_sft" / "model.safetensors").is_file()
