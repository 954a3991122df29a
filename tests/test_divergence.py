"""A run with non-finite values ends with a dedicated exit code and keeps its best weights."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.config import StepConfig, TrainedModelConfig
from pipeline.report.findings import findings
from pipeline.report.results import Results, StepResult
from pipeline.system.errors import EXIT_DIVERGED, DivergedError
from tests.jobs import run_job
from tests.sources import ROOT
from tests.test_resume import CONFIGS, train_step


def with_lr(model: TrainedModelConfig, lr: float) -> TrainedModelConfig:
    return replace(model, optim=replace(model.optim, lr=lr, warmup_steps=0))


def diverging_config(step: str, models: Path, out: Path, **changes: Any) -> StepConfig:
    config = replace(CONFIGS[step](models), output_dir=out, save_every=None, **changes)
    if step == "ppo":
        return replace(config, actor=with_lr(config.actor, 1e10), ema_decay=None, ptx_coef=0.0)
    return replace(config, model=with_lr(config.model, 1e10))


EXPORTED = {"sft": ".", "ppo": "actor"}


EVALUATED = {"sft": "held-out perplexity", "reward": "held-out rows", "ppo": "held-out prompts"}


@pytest.mark.parametrize("eval_every", [None, 1])
@pytest.mark.parametrize("step", list(CONFIGS))
def test_divergence_reports_step_and_cause_and_exports_best_weights(
    step: str, eval_every: int | None, models: Path, tmp_path: Path
) -> None:
    config = diverging_config(step, models, tmp_path / "out", max_steps=30, eval_every=eval_every)

    with pytest.raises(DivergedError) as error:
        train_step(config)

    message = str(error.value)
    assert "diverged after step" in message
    if eval_every is not None:
        assert f"{EVALUATED[step]} after" in message
        assert "diverged after step 1: " in message
    assert "is nan; lower the learning rate" in message
    assert "optim.lr is 1e+10" in message
    assert not (config.output_dir / "result.json").exists()
    record = json.loads((config.output_dir / "diverged.json").read_text())
    assert record["sentence"] == message
    if step in EXPORTED:
        assert message.endswith("the best evaluated weights, after step 0, are exported")
        initial = AutoModelForCausalLM.from_pretrained(models / "actor").state_dict()
        best = AutoModelForCausalLM.from_pretrained(config.output_dir / EXPORTED[step])
        assert all(torch.equal(best.state_dict()[name], param) for name, param in initial.items())


@pytest.mark.jobs
def test_all_ranks_stop_with_one_error(models: Path, tmp_path: Path) -> None:
    # Without evaluations, twenty steps in a row without a finite gradient end the run.
    config = diverging_config("sft", models, tmp_path / "out", max_steps=40, eval_every=0)

    job = run_job(train_step, config)

    assert job.codes == [EXIT_DIVERGED] * 2
    assert job.errors.count("error: step1_sft diverged after step") == 1
    assert "the gradient was infinite or NaN for 20 steps in a row" in job.errors
    assert "Traceback" not in job.errors


def run_train(out: Path, *args: str) -> subprocess.CompletedProcess[str]:
    small = ("--sft.data.max_eval_rows", "4", "--reward.data.max_eval_rows", "4")
    command = [sys.executable, "train.py", "--output-dir", str(out), *small]
    return subprocess.run([*command, *args], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.faults
def test_pipeline_stops_at_divergence_and_resumes_at_a_lower_rate(tmp_path: Path) -> None:
    out = tmp_path / "out"
    short = ("--sft.max_steps", "6", "--reward.max_steps", "2", "--sft.save_every", "1")

    first = run_train(out, "--step", "1", "2", *short, "--sft.model.optim.lr", "1e10")

    assert first.returncode == EXIT_DIVERGED
    assert "Traceback" not in first.stderr
    errors = [line for line in first.stderr.splitlines() if "diverged" in line]
    assert len(errors) == 2
    assert errors[0].startswith("error: step1_sft diverged after step 1: held-out perplexity")
    assert errors[1].endswith("--resume and a smaller --sft.model.optim.lr")
    assert not (out / "step2_reward").exists()
    assert "step1_sft diverged after step 1" in (out / "report.html").read_text()

    resumed = run_train(out, "--step", "1", *short, "--sft.model.optim.lr", "1e-3", "--resume")

    assert resumed.returncode == 0, resumed.stderr
    assert (out / "step1_sft" / "result.json").exists()
    assert not (out / "step1_sft" / "diverged.json").exists()
    assert "diverged" not in (out / "report.html").read_text()


def test_report_headline_names_diverged_and_unevaluated_steps() -> None:
    def headline(*others: str, **changes: Any) -> tuple[str | None, str]:
        step = StepResult(name="step1_sft", **{"finished": False, **changes})
        steps = {name: StepResult(name=name, finished=False) for name in others}
        finding, *_ = findings(Results(steps={"step1_sft": step} | steps, seconds=0.0, samples=()))
        return finding.verdict, finding.text

    assert headline() == (None, "step1_sft has not been evaluated yet")
    assert headline("step2_reward") == (
        None,
        "step1_sft and step2_reward have not been evaluated yet",
    )
    assert headline(finished=True, eval={"perplexity_after": None}) == (
        None,
        "The evaluation of step1_sft produced no finite value",
    )
    assert headline(diverged="step1_sft diverged after step 4: x") == (
        "worse",
        "step1_sft diverged after step 4: x",
    )
