"""Step 3 exports the actor of the best held-out evaluation."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.run.run import get_training_id
from pipeline.system.errors import ConfigError
from step3_ppo.config import PPOConfig
from step3_ppo.train import train
from tests.step3_ppo.toy import toy_config


def worsening_config(toy: Path, out: Path, **changes: Any) -> PPOConfig:
    """Return settings whose KL penalty dominates, so that each iteration makes the actor worse."""
    steps = {"max_steps": 2, "eval_every": 1, "max_prompt_length": 40}
    config = toy_config(toy, kl_coef=5000.0, output_dir=out, **steps, **changes)
    return replace(config, data=replace(config.data, max_eval_rows=4))


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def same_weights(first_dir: Path, second_dir: Path) -> bool:
    first, second = load_weights(first_dir), load_weights(second_dir)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.jobs
def test_actor_that_only_got_worse_is_not_exported(
    toy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(worsening_config(toy, tmp_path / "best"))
    log = caplog.text
    train(worsening_config(toy, tmp_path / "last", keep_best=False))

    assert same_weights(tmp_path / "best" / "actor", toy / "actor")
    assert not same_weights(tmp_path / "last" / "actor", toy / "actor")
    files = (tmp_path / name / "result.json" for name in ("best", "last"))
    best, last = (json.loads(file.read_text())["eval"] for file in files)
    assert (best["best_step"], last["best_step"]) == (0, 2)
    assert best["score_after"] == best["score_before"]
    assert best["kl"] == 0.0 < last["kl"]
    assert "PPO did not improve the actor on held-out prompts" in log
    assert "; the initial weights are exported" in log
    text = (tmp_path / "best" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    objectives = [line["eval_objective"] for line in lines if "eval_objective" in line]
    assert len(objectives) == 3
    origins = [line["began_from"] for line in lines if "began_from" in line]
    assert origins == [str(toy / "actor")]  # no training run created it
    assert max(objectives) == objectives[0]
    assert f"({objectives[-1]:.3g}, initially {objectives[0]:.3g})" in log


@pytest.mark.faults
def test_resume_requires_the_same_initial_model(toy: Path, tmp_path: Path) -> None:
    actor = tmp_path / "actor"
    shutil.copytree(toy / "actor", actor)
    model = replace(toy_config(toy).actor, path=str(actor))
    config = worsening_config(toy, tmp_path / "out", actor=model, save_every=1)
    config = replace(config, max_steps=1)
    (actor / "result.json").write_text('{"steps": 9, "eval": {"perplexity_after": 2.5}}')
    train(config)
    for path in (config.output_dir / "result.json", config.output_dir / "actor"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    first, *_ = (config.output_dir / "metrics.jsonl").read_text().splitlines()

    (actor / "result.json").write_text('{"steps": 9, "eval": {"perplexity_after": 2.25}}')
    with pytest.raises(ConfigError, match="is not the one that this run started from"):
        train(replace(config, resume=True))
    (actor / "result.json").write_text(
        '{"seconds": 5, "steps": 9, "eval": {"perplexity_after": 2.5}}'
    )
    train(replace(config, resume=True))

    assert json.loads(first)["began_from"] == get_training_id(str(actor))
