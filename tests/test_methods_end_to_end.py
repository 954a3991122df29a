"""Several methods in one command: a directory per method and one comparison."""

import json
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from pipeline.cli.options import parse_step
from step3_ppo.config import PPOConfig
from step3_ppo.train import train
from tests.commands import run_command
from tests.step3_ppo.toy import save_models
from tests.test_resume import read_metrics

STEP3 = [
    *("--config", "embedded.yaml", "--data-path", "embedded", "--step", "3", "--plan", "off"),
    *("--ppo.max_steps", "3", "--ppo.eval_every", "1", "--ppo.ppo_epochs", "1"),
    *("--ppo.rollout_size", "8", "--ppo.batch_size", "8", "--ppo.max_new_tokens", "6"),
    *("--ppo.data.max_eval_rows", "8", "--ppo.base.path", "null", "--ppo.keep_best", "false"),
    *("--ppo.actor.optim.lr", "1e-2", "--methods.rloo.kl_coef", "0.01"),
]
"""Three short iterations of step 3, with updates large enough for a measurable KL."""


def run_train(out: Path, *options: str) -> CompletedProcess[str]:
    return run_command("train.py", "--output-dir", str(out), *options)


def read_weights(directory: Path) -> bytes:
    return (directory / "actor" / "model.safetensors").read_bytes()


@pytest.mark.faults
def test_methods_of_one_run_are_compared_and_match_separate_runs(tmp_path: Path) -> None:
    save_models(tmp_path)
    paths = {"actor": "actor", "critic": "reward", "reward": "reward"}
    models = [
        word
        for role, name in paths.items()
        for word in (f"--ppo.{role}.path", f"{tmp_path}/{name}")
    ]
    out = tmp_path / "out"

    first = run_train(out, "--method", "ppo", "rloo", *STEP3, *models)

    assert first.returncode == 0, first.stderr
    assert json.loads((out / "summary.json").read_text())["steps"].keys() == {
        "step3_ppo",
        "step3_rloo",
    }
    assert "At equal KL (" in first.stdout
    assert "\nmethod  correct and polite  " in first.stdout
    page = (out / "report.html").read_text()
    assert "The methods side by side" in page
    assert "At equal KL (" in page
    samples = json.loads((out / "step3_rloo" / "samples.json").read_text())
    assert list(samples["rows"][0]["answers"]) == ["start", "step3_rloo"]

    before = (read_weights(out / "step3_rloo"), read_metrics(out / "step3_rloo"))
    resumed = run_train(out, "--method", "ppo", "rloo", "raft", *STEP3, *models, "--resume")

    assert resumed.returncode == 0, resumed.stderr
    assert "(ppo): already finished\nskipping step 3 (rloo): already finished" in resumed.stdout
    assert "\nRAFT " in resumed.stdout
    assert (read_weights(out / "step3_rloo"), read_metrics(out / "step3_rloo")) == before

    config = parse_step(PPOConfig, ["--config", str(out / "step3_rloo" / "config.yaml")])
    train(replace(config, output_dir=tmp_path / "alone"))
    assert (read_weights(tmp_path / "alone"), read_metrics(tmp_path / "alone")) == before
