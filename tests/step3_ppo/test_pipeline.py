"""Step 3 with pipeline parallelism matches one process bitwise."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import LoraConfig, OptimConfig, ParallelConfig
from rewards.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.methods import METHODS
from step3_ppo.train import train
from tests.distributed import run_ranks
from tests.staged import hash_weights, remove_last_checkpoint, require_less_memory, train_sharded
from tests.step3_ppo.toy import FEW, save_models, toy_config
from tests.test_resume import read_metrics

run = partial(train_sharded, train)

BOTH = ("actor", "critic")

CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo, programs, adapters, bf16": {
        "method": "grpo",
        "group_size": 2,
        "rewards": (RewardConfig(name="short", kind="length", max_tokens=3),),
        "models": {"lora": LoraConfig(rank=2), "precision": "bf16"},
    },
    "two epochs, texts, average, stage 1": {
        "ppo_epochs": 2,
        "batch_size": 4,
        "ptx_coef": 0.5,
        "ema_decay": 0.9,
        "models": {"zero_stage": 1, "gradient_checkpointing": True},
    },
    "joint generation": {"inference_tp_size": 2},
    "refilled groups, fp16": {
        "method": "dapo",
        "group_size": 2,
        "rewards": (
            RewardConfig(name="model", kind="model"),
            RewardConfig(name="short", kind="length", max_tokens=3),
        ),
        "models": {"precision": "fp16", "fp32_head": True},
    },
}
SHORT = ("ppo",)
"""Cases of the default test run; the others are in the grid."""


def make_config(directory: Path, out: Path, *, pp: int, **changes: Any) -> PPOConfig:
    """Return settings of two iterations with three micro-batches each."""
    parallel = {"pp": pp, "micro_batches": 3, **changes.pop("parallel", {})}
    model = changes.pop("models", {})
    optim = OptimConfig(lr=0.003, eps=1e-5, schedule="constant", max_grad_norm=0.5)
    config = toy_config(directory)
    models = {role: replace(getattr(config, role), optim=optim, **model) for role in BOTH}
    defaults: dict[str, Any] = {
        "output_dir": out,
        "data": replace(FEW, max_length=56, max_eval_rows=4),
        "max_steps": 2,
        "max_prompt_length": 48,
        "save_every": 1,
        "keep_best": False,
        "parallel": ParallelConfig(**parallel),
    }
    return toy_config(
        directory, **{**METHODS[changes.get("method", "ppo")], **models, **defaults, **changes}
    )


def read_outcome(out: Path) -> dict[str, Any]:
    """Return all outputs that don't depend on time.

    The rollout gap is excluded, since its last digit depends on the sequences that are generated
    together.
    """
    return {
        "weights": hash_weights(out),
        "metrics": [
            {name: value for name, value in line.items() if not name.startswith("rollout_gap")}
            for line in read_metrics(out)
        ],
        "eval": json.loads((out / "result.json").read_text())["eval"],
        "samples": (out / "samples.json").read_text(),
        "critic": (out / "critic" / "config.json").exists()
        and json.loads((out / "critic" / "config.json").read_text()),
    }


@pytest.mark.jobs
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in SHORT else pytest.mark.grid) for n in CASES]
)
def test_two_stages_match_one_process_bitwise(case: str, tmp_path: Path) -> None:
    save_models(tmp_path)
    changes = {**CASES[case], "inference_tp_size": 1}
    single = make_config(tmp_path, tmp_path / "alone", pp=1, **changes)
    staged = make_config(tmp_path, tmp_path / "staged", pp=2, **CASES[case])
    run(single)

    run_ranks(run, staged)

    assert read_outcome(staged.output_dir) == read_outcome(single.output_dir)
    remove_last_checkpoint(staged.output_dir, last=2)
    run(replace(staged, parallel=single.parallel, inference_tp_size=1, resume=True))
    assert read_outcome(staged.output_dir) == read_outcome(single.output_dir)
    require_less_memory(staged, single)


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    # Processes, parallel settings, other settings, and processes of the reference run.
    "tensor parallelism": (4, {"tp": 2}, {"inference_tp_size": 2}, 2),
    "tensor parallelism, separate generation": (4, {"tp": 2}, {}, 2),
    "two pipelines, replicas": (4, {"replicas": 2}, {"models": {"zero_stage": 1}}, 2),
    "two pipelines, joint generation": (4, {}, {"inference_tp_size": 4}, 2),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_with_stages_match_those_without(name: str, tmp_path: Path) -> None:
    world, parallel, changes, reference_world = LAYOUTS[name]
    save_models(tmp_path)
    plain = {**parallel, "replicas": 1}
    size = min(reference_world, changes.get("inference_tp_size", 1)) if "tp" in parallel else 1
    reference_changes = {**changes, "inference_tp_size": size}
    reference = make_config(tmp_path, tmp_path / "alone", pp=1, parallel=plain, **reference_changes)
    staged = make_config(tmp_path, tmp_path / "staged", pp=2, parallel=parallel, **changes)
    run_ranks(run, reference, world_size=reference_world)

    run_ranks(run, staged, world_size=world)

    assert read_outcome(staged.output_dir) == read_outcome(reference.output_dir)
