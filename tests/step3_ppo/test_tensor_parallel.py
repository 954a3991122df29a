"""Step 3 on two processes that compute each layer together."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from pipeline.budget.machine import Machine
from pipeline.budget.memory import RUNTIME_CPU, step_memory
from pipeline.config import DataConfig, LoraConfig, ParallelConfig
from pipeline.parallel.mesh import cut_mesh
from rewards.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.methods import METHODS
from step3_ppo.train import train
from tests.distributed import run_ranks
from tests.step3_ppo.toy import save_models, toy_config

NF4 = {"quantize": "nf4"}

CASES: dict[str, dict[str, Any]] = {
    "generating together": {"inference_tp_size": 2},
    "generating whole, stage 3, adapters": {
        "actor": {"zero_stage": 3, "lora": LoraConfig(rank=2, lr=0.0005)},
        "critic": {"zero_stage": 3},
    },
    "4 bits, generating together": {
        "actor": {"lora": LoraConfig(rank=2, lr=0.0005), **NF4},
        "critic": {"lora": LoraConfig(rank=2, lr=0.0005), **NF4},
        "reward": {"quantize": "int8"},
        "inference_tp_size": 2,
    },
    "4 bits, generating whole": {
        "actor": {"lora": LoraConfig(rank=2, lr=0.0005), **NF4, "zero_stage": 3},
        "critic": {"lora": LoraConfig(rank=2, lr=0.0005), **NF4},
    },
    "programs": {
        "method": "grpo",
        "group_size": 2,
        "rewards": (RewardConfig(name="short", kind="length", max_tokens=3),),
        "inference_tp_size": 2,
    },
}


def small(directory: Path, changes: dict[str, Any]) -> PPOConfig:
    """Two rollouts, each learned from once."""
    config = toy_config(directory)
    changes = dict(changes)
    models = {
        role: replace(getattr(config, role), **changes.pop(role, {}))
        for role in ("actor", "critic", "reward")
    }
    data = DataConfig(max_length=56, max_eval_rows=4)
    row = METHODS[changes.get("method", "ppo")]
    # With this seed no two tokens are so close that rounding decides which one is sampled.
    own = {"data": data, "max_steps": 2, "max_prompt_length": 48, "seed": 6}
    return toy_config(directory, **{**row, **changes, **models, **own})


def run(config: PPOConfig) -> None:
    with cut_mesh(replicas=1, tp=config.parallel.tp, timeout_seconds=60.0):
        train(config)


def logged(out: Path) -> list[dict[str, float]]:
    """All figures but those of the clock, and of weights bit for bit."""
    apart = ("seconds", "tokens_per_second", "memory", "weights_hash", "time")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: each
            for name, each in line.items()
            if isinstance(each, float | int) and not name.startswith(apart)
        }
        for line in lines
    ]


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES)
def test_two_processes_learn_what_one_does(case: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 128} if "bits" in case else {}
    save_models(tmp_path, **wide)
    changes = CASES[case]
    alone = small(tmp_path, {**changes, "inference_tp_size": 1, "output_dir": tmp_path / "alone"})
    together = small(
        tmp_path, {**changes, "parallel": ParallelConfig(tp=2), "output_dir": tmp_path / "both"}
    )
    train(alone)

    run_ranks(run, together)

    found, expected = logged(together.output_dir), logged(alone.output_dir)
    assert len(found) >= 4
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=2e-3, abs=2e-3)
    AutoModelForCausalLM.from_pretrained(together.output_dir / "actor")
    part = step_memory(together, machine=Machine(2, 2, None, 2**34, "it"))
    whole = step_memory(alone, machine=Machine(1, 1, None, 2**34, "it"))
    assert part.peak("device") - RUNTIME_CPU < whole.peak("device") - RUNTIME_CPU
