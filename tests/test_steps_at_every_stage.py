"""The three steps on two processes end in the same weights at every ZeRO stage."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import FrozenModelConfig, LoraConfig, OptimConfig, TrainedModelConfig
from pipeline.config.model import OffloadConfig, ZeroConfig
from pipeline.parallel.mesh import split_mesh
from step1_sft.config import SFTConfig
from step1_sft.train import train as train_sft
from step2_reward.config import RewardConfig
from step2_reward.train import train as train_reward
from step3_ppo.config import PPOConfig
from step3_ppo.train import train as train_ppo
from tests.distributed import run_ranks
from tests.staged import hash_weights
from tests.step3_ppo.toy import FEW

DATA = replace(FEW, max_eval_rows=14, max_length=64)
SHORT: dict[str, Any] = {"data": DATA, "max_steps": 2, "batch_size": 8, "micro_batch_size": 1}


def model_config(path: Path, **changes: Any) -> TrainedModelConfig:
    optim = OptimConfig(lr=1e-3, max_grad_norm=0.5)
    settings = {"path": str(path), "precision": "bf16", "optim": optim, **changes}
    return TrainedModelConfig(**settings)


def sft(models: Path, out: Path, **changes: Any) -> None:
    train_sft(SFTConfig(output_dir=out, model=model_config(models / "actor", **changes), **SHORT))


def reward(models: Path, out: Path, **changes: Any) -> None:
    train_reward(
        RewardConfig(output_dir=out, model=model_config(models / "actor", **changes), **SHORT)
    )


def ppo(models: Path, out: Path, **changes: Any) -> None:
    generation = {name: changes.pop(name) for name in GENERATION if name in changes}
    train_ppo(
        PPOConfig(
            output_dir=out,
            actor=model_config(models / "actor", **changes),
            critic=model_config(models / "reward", **changes),
            reward=FrozenModelConfig(path=str(models / "reward"), precision="bf16"),
            base=FrozenModelConfig(path=None),
            rollout_size=8,
            max_prompt_length=40,
            max_new_tokens=8,
            ema_decay=0.9,
            **SHORT,
            **generation,
        )
    )


GENERATION = ("inference_tp_size", "replica", "offload_in_generation")
STEPS = {"sft": sft, "reward": reward, "ppo": ppo}


def run_step(step: str, models: str, out: str, changes: dict[str, Any], copies: int = 1) -> None:
    with split_mesh(replicas=copies, timeout_seconds=60.0):
        STEPS[step](Path(models), Path(out), **changes)


OFFLOAD = OffloadConfig(optimizer="cpu", gradients="cpu", params="cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0},
    "offload": {"zero_stage": 3, "zero": ZeroConfig(offload=OFFLOAD)},
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
}
LORA = LoraConfig(rank=2)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("step", "lora", "num_variants"),
    [
        # Stage 0 and stage 3 with offload; the grid has all steps and stages.
        pytest.param("sft", LORA, 2, id="sft-LoRA"),
        *(
            pytest.param(step, lora, len(VARIANTS), id=f"{step}-{name}-all", marks=pytest.mark.grid)
            for step in STEPS
            for name, lora in (("all weights", None), ("LoRA", LORA))
        ),
    ],
)
def test_final_weights_are_equal_at_every_zero_stage(
    step: str, lora: LoraConfig | None, num_variants: int, models: Path, tmp_path: Path
) -> None:
    hashes: dict[str, dict[str, str]] = {}

    for name, changes in list(VARIANTS.items())[:num_variants]:
        out = tmp_path / name
        run_ranks(run_step, step, str(models), str(out), {**changes, "lora": lora})
        hashes[name] = hash_weights(out)

    assert len(set(map(str, hashes.values()))) == 1, hashes


@pytest.mark.grid
@pytest.mark.parametrize("step", STEPS)
def test_final_weights_are_equal_with_sharded_copies(
    step: str, models: Path, tmp_path: Path
) -> None:
    hashes: dict[int, dict[str, str]] = {}

    for copies in (1, 2):
        out = tmp_path / str(copies)
        run_ranks(run_step, step, str(models), str(out), {"zero_stage": 3}, copies, world_size=4)
        hashes[copies] = hash_weights(out)
        result = json.loads((out / "result.json").read_text())
        mesh = {"processes": 4, "stages": 1, "tensor": 1, "replicas": copies, "shards": 4 // copies}
        assert result["mesh"] == mesh

    assert hashes[1] == hashes[2]


@pytest.mark.jobs
def test_step3_rollouts_match_with_tensor_parallel_generation(models: Path, tmp_path: Path) -> None:
    variants: dict[str, dict[str, Any]] = {
        "one rank": {"inference_tp_size": 1},
        "tensor-parallel": {"inference_tp_size": 2, "offload_in_generation": True},
    }
    rollouts: dict[str, list[dict[str, Any]]] = {}

    for name, changes in variants.items():
        run_ranks(
            run_step, "ppo", str(models), str(tmp_path / name), {"precision": "fp32", **changes}
        )
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        rollouts[name] = [line for line in lines if "weights_hash" in line]

    for name, rollout in rollouts.items():
        assert len({line["weights_hash"] for line in rollout}) == len(rollout) == 2, name
        assert rollout[0]["weights_hash"] == rollouts["one rank"][0]["weights_hash"], name
        assert all(line["rollout_gap"] < 1e-5 for line in rollout), name
        for metric in ("score", "response_length"):
            assert rollout[0][metric] == pytest.approx(rollouts["one rank"][0][metric], abs=1e-5), (
                name
            )
