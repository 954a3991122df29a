"""Every method resumes bitwise and learns the same on one and two processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import FrozenModelConfig, OptimConfig
from step3_ppo.config import PPOConfig
from step3_ppo.methods import METHODS
from step3_ppo.train import train
from tests.distributed import run_ranks
from tests.step3_ppo.resumed import run_full_and_resumed
from tests.step3_ppo.toy import toy_config
from tests.test_resume import read_metrics

CASES = [
    pytest.param(method, id=method, marks=() if method == "dapo" else pytest.mark.grid)
    for method in METHODS
    if method != "distill"
]


def make_config(method: str, toy: Path, out: Path, **changes: Any) -> PPOConfig:
    """Return settings of a method on groups of two, with scores clipped to signs, some equal."""
    row = {**METHODS[method], "rollout_size": 8, "batch_size": 4}
    row["batch_size"] = 8 if row.get("loss") == "none" else 4
    row["group_size"] = min(2, row.get("group_size", 1))
    settings = {
        "max_steps": 2,
        "max_prompt_length": 40,
        "score_clip": 1e-3,
        "missing_eos_score": None,
        "normalize_score": False,
        "correction": "truncate",
        "eval_every": 0,
        "keep_best": False,
    }
    if method == "gkd":
        del settings["score_clip"]
        settings["teacher"] = FrozenModelConfig(path=str(toy / "teacher"))
    config = toy_config(toy, output_dir=out, method=method, **{**settings, **row, **changes})
    optim = OptimConfig(lr=1e-3, eps=1e-5, schedule="constant", warmup_ratio=0.0)
    trained = {role: replace(getattr(config, role), optim=optim) for role in ("actor", "critic")}
    return replace(config, data=replace(config.data, max_eval_rows=4), **trained)


def load_actor(out: Path) -> dict[str, torch.Tensor]:
    """Return the actor's weights."""
    return load_file(out / "actor" / "model.safetensors")


@pytest.mark.grid
@pytest.mark.parametrize("method", CASES)
def test_interrupted_method_resumes_bitwise(method: str, toy: Path, tmp_path: Path) -> None:
    run_full_and_resumed(make_config(method, toy, tmp_path, save_every=1), tmp_path)

    full, resumed = tmp_path / "full", tmp_path / "resumed"
    assert read_metrics(resumed) == read_metrics(full)
    weights = "actor/model.safetensors"
    assert (resumed / weights).read_bytes() == (full / weights).read_bytes()


@pytest.mark.jobs
@pytest.mark.parametrize("method", CASES)
def test_method_learns_the_same_on_one_and_two_processes(
    method: str, toy: Path, tmp_path: Path
) -> None:
    single, together = tmp_path / "alone", tmp_path / "together"
    config = make_config(method, toy, single)
    train(config)
    trained = {role: replace(getattr(config, role), zero_stage=3) for role in ("actor", "critic")}
    run_ranks(train, replace(config, output_dir=together, **trained))

    if config.dynamic_sampling > 0:
        assert sum(line.get("refills", 0) for line in read_metrics(single)) > 0
    kls = [line.get("kl", line.get("eval_kl")) for line in read_metrics(single)]
    assert any(kl is not None for kl in kls) == (config.reference_role == "reference")
    expected, actual = load_actor(single), load_actor(together)
    for name in expected:
        torch.testing.assert_close(expected[name], actual[name], rtol=1e-4, atol=1e-5)
    for metrics, other in zip(read_metrics(single), read_metrics(together), strict=True):
        for name in metrics.keys() & {"refills", "response_length", "dead_groups", "reward_score"}:
            assert metrics[name] == pytest.approx(other[name], abs=1e-6), name
