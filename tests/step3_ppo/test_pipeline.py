"""Step 3 through the stages of a pipeline ends as on one process, to the bit."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import LoraConfig, OptimConfig, ParallelConfig
from pipeline.parallel.mesh import cut_mesh
from rewards.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.methods import METHODS
from step3_ppo.train import train
from tests.distributed import run_ranks
from tests.staged import remove_last_checkpoint, require_less_memory
from tests.step3_ppo.toy import FEW, save_models, toy_config

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
    "generating together": {"inference_tp_size": 2},
    "refilled groups, fp16": {
        "method": "dapo",
        "group_size": 2,
        "rewards": (
            RewardConfig(name="model", kind="model"),
            RewardConfig(name="short", kind="length", max_tokens=3),
        ),
        "models": {"precision": "fp16"},
    },
}
SOME = ("ppo",)
"""That every run of the tests goes through; the others are the grid."""


def small(directory: Path, out: Path, *, pp: int, **changes: Any) -> PPOConfig:
    """Two rollouts, each learned from in three micro-batches."""
    division = {"pp": pp, "micro_batches": 3, **changes.pop("parallel", {})}
    model = changes.pop("models", {})
    optim = OptimConfig(lr=0.003, eps=1e-5, schedule="constant", max_grad_norm=0.5)
    config = toy_config(directory)
    models = {role: replace(getattr(config, role), optim=optim, **model) for role in BOTH}
    own: dict[str, Any] = {
        "output_dir": out,
        "data": replace(FEW, max_length=56, max_eval_rows=4),
        "max_steps": 2,
        "max_prompt_length": 48,
        "save_every": 1,
        "keep_best": False,
        "parallel": ParallelConfig(**division),
    }
    return toy_config(
        directory, **{**METHODS[changes.get("method", "ppo")], **models, **own, **changes}
    )


def run(config: PPOConfig) -> None:
    division = config.parallel
    with cut_mesh(replicas=division.replicas, pp=division.pp, tp=division.tp, timeout_seconds=60.0):
        train(config)


def ended(out: Path) -> dict[str, Any]:
    """The weights, what was logged and written, but for what the clock says.

    And but for how far generation is from training, whose last digit depends on what is generated
    at once.
    """
    apart = ("seconds", "tokens_per_second", "memory", "time", "bubble", "rollout_gap")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": {
            str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(out.rglob("*.safetensors"))
            if "checkpoints" not in file.parts
        },
        "metrics": [
            {name: each for name, each in line.items() if not name.startswith(apart)}
            for line in lines
        ],
        "eval": json.loads((out / "result.json").read_text())["eval"],
        "samples": (out / "samples.json").read_text(),
        "critic": (out / "critic" / "config.json").exists()
        and json.loads((out / "critic" / "config.json").read_text()),
    }


@pytest.mark.jobs
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in SOME else pytest.mark.grid) for n in CASES]
)
def test_two_stages_end_as_one_process(case: str, tmp_path: Path) -> None:
    save_models(tmp_path)
    whole = {**CASES[case], "inference_tp_size": 1}
    alone = small(tmp_path, tmp_path / "alone", pp=1, **whole)
    staged = small(tmp_path, tmp_path / "staged", pp=2, **CASES[case])
    run(alone)

    run_ranks(run, staged)

    assert ended(staged.output_dir) == ended(alone.output_dir)
    remove_last_checkpoint(staged.output_dir, last=2)
    run(replace(staged, parallel=alone.parallel, inference_tp_size=1, resume=True))
    assert ended(staged.output_dir) == ended(alone.output_dir)
    require_less_memory(staged, alone)


MIXTURES: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    # Processes, division, settings, and the processes of the run that it is compared with.
    "with parts of each layer": (4, {"tp": 2}, {"inference_tp_size": 2}, 2),
    "parts of each layer, generating apart": (4, {"tp": 2}, {}, 2),
    "two pipelines, replicas": (4, {"replicas": 2}, {"models": {"zero_stage": 1}}, 2),
    "two pipelines generating together": (4, {}, {"inference_tp_size": 4}, 2),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_end_as_the_same_without_stages(name: str, tmp_path: Path) -> None:
    world, division, changes, other = MIXTURES[name]
    save_models(tmp_path)
    plain = {**division, "replicas": 1}
    size = min(other, changes.get("inference_tp_size", 1)) if "tp" in division else 1
    whole = {**changes, "inference_tp_size": size}
    alone = small(tmp_path, tmp_path / "alone", pp=1, parallel=plain, **whole)
    staged = small(tmp_path, tmp_path / "staged", pp=2, parallel=division, **changes)
    run_ranks(run, alone, world_size=other)

    run_ranks(run, staged, world_size=world)

    assert ended(staged.output_dir) == ended(alone.output_dir)
