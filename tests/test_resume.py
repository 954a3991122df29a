"""An interrupted run resumes exactly: weights, moments and metrics."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import (
    FrozenModelConfig,
    LoraConfig,
    LossScaleConfig,
    OptimConfig,
    StepConfig,
    TrainedModelConfig,
)
from pipeline.engine.checkpoint.__main__ import main as checkpoints
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from step0_pretrain.config import PretrainConfig
from step0_pretrain.train import train as train_pretrain
from step1_sft.config import SFTConfig
from step1_sft.train import train as train_sft
from step2_reward.config import RewardConfig
from step2_reward.train import train as train_reward
from step3_ppo.config import PPOConfig
from step3_ppo.train import train as train_ppo
from step3_preference.config import PreferenceConfig
from step3_preference.train import train as train_preference
from tests.distributed import run_ranks
from tests.step3_ppo.toy import FEW

DATA = replace(FEW, max_eval_rows=6, max_length=64)
HALF_STEPS = 2
"""Steps before the interruption, and after it."""

COMMON: dict[str, Any] = {
    "data": DATA,
    "max_steps": 2 * HALF_STEPS,
    "batch_size": 8,
    "micro_batch_size": 2,
    "save_every": HALF_STEPS,
}
TIME_PREFIXES = ("seconds", "tokens_per_second", "memory_gb", "bubble")


def model_config(path: Path, moments: Any = "fp32", **changes: Any) -> TrainedModelConfig:
    optim = OptimConfig(lr=1e-3, max_grad_norm=0.5, warmup_steps=2, moments=moments)
    scaling = LossScaleConfig(initial_scale_power=14, loss_scale_window=1)
    return TrainedModelConfig(path=str(path), optim=optim, fp16=scaling, **changes)


def sft(models: Path, **changes: Any) -> SFTConfig:
    model = model_config(models / "actor", **changes)
    return SFTConfig(output_dir=models, model=model, eval_every=1, **COMMON)


def reward(models: Path, **changes: Any) -> RewardConfig:
    return RewardConfig(
        output_dir=models, eval_every=1, model=model_config(models / "actor", **changes), **COMMON
    )


def ppo(models: Path, **changes: Any) -> PPOConfig:
    return PPOConfig(
        output_dir=models,
        eval_every=1,
        actor=model_config(models / "actor", **changes),
        critic=model_config(models / "reward", **changes),
        reward=FrozenModelConfig(path=str(models / "reward")),
        base=FrozenModelConfig(path=None),
        rollout_size=8,
        max_prompt_length=40,
        max_new_tokens=8,
        ema_decay=0.9,
        ptx_coef=0.1,
        **COMMON,
    )


CONFIGS = {"sft": sft, "reward": reward, "ppo": ppo}


def train_step(config: StepConfig) -> None:
    match config:
        case PretrainConfig():
            train_pretrain(config)
        case SFTConfig():
            train_sft(config)
        case RewardConfig():
            train_reward(config)
        case PPOConfig():
            train_ppo(config)
        case PreferenceConfig():
            train_preference(config)


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """Return the logged metrics, without times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(TIME_PREFIXES)}
        for line in lines
    ]


def read_metric(config: StepConfig, name: str) -> list[Any]:
    """Return a metric's logged values."""
    return [line[name] for line in read_metrics(config.output_dir) if name in line]


def read_checkpoint(out: Path, step: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    checkpoint = Checkpoint.open(out / "checkpoints" / f"step_{step:08d}")
    checkpoint.verify()
    tensors = {
        key: torch.empty(checkpoint.numel(key), dtype=checkpoint.dtype(key))
        for key in sorted(checkpoint.keys())
    }
    for key, tensor in tensors.items():
        checkpoint.read(key, 0, tensor)
    return tensors


def copy_interrupted(full_run: Path, out: Path) -> None:
    """Copy a finished run as if it had been killed after its first checkpoint."""
    shutil.copytree(full_run, out)
    for path in (out / "checkpoints").glob(f"step_*{2 * HALF_STEPS}"):
        shutil.rmtree(path)
    (out / "result.json").unlink()
    for path in out.rglob("model.safetensors"):
        path.unlink()


VARIANTS: dict[str, dict[str, Any]] = {
    "stage 0, fp16": {"zero_stage": 0, "precision": "fp16"},
    "stage 3, bf16": {"zero_stage": 3, "precision": "bf16"},
    "LoRA, stage 3": {"zero_stage": 3, "lora": LoraConfig(rank=2, dropout=0.1)},
    "bf16 moments, stage 2": {"zero_stage": 2, "precision": "bf16", "moments": "bf16"},
    "LoRA on NF4, stage 3": {
        "zero_stage": 3,
        "precision": "bf16",
        "lora": LoraConfig(rank=2),
        "quantize": "nf4",
    },
}


CASES = [
    # Each step and each variant once; the other combinations are in the grid.
    pytest.param(step, way, id=f"{step}-{way}", marks=marks if row == column else pytest.mark.grid)
    for row, step in enumerate(CONFIGS)
    for marks in (() if step == "ppo" else pytest.mark.jobs,)
    for column, way in enumerate(("LoRA, stage 3", "stage 0, fp16", "stage 3, bf16"))
]
CASES += [
    pytest.param(
        step, way, id=f"{step}-{way}", marks=pytest.mark.jobs if step == one else pytest.mark.grid
    )
    for way, one in (("LoRA on NF4, stage 3", "sft"), ("bf16 moments, stage 2", "reward"))
    for step in CONFIGS
]


@pytest.mark.parametrize(("step", "variant"), CASES)
def test_interrupted_run_resumes_bitwise(
    step: str, variant: str, models: Path, tmp_path: Path
) -> None:
    changes = VARIANTS[variant]
    if step == "ppo" and "lora" in changes:
        # Dropout would change the ratio.
        changes = {**changes, "lora": replace(changes["lora"], dropout=0.0)}
    keeps_best = variant != "stage 3, bf16"
    config = replace(CONFIGS[step](models, **changes), keep_best=keeps_best)
    full_run, resumed = tmp_path / "whole", tmp_path / "again"
    run_ranks(train_step, replace(config, output_dir=full_run))
    copy_interrupted(full_run, resumed)

    run_ranks(train_step, replace(config, output_dir=resumed, resume=True))

    assert read_metrics(resumed) == read_metrics(full_run)
    expected, actual = (
        read_checkpoint(full_run, 2 * HALF_STEPS),
        read_checkpoint(resumed, 2 * HALF_STEPS),
    )
    assert expected.keys() == actual.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensor, actual[key]), key
    assert read_exported(resumed) == read_exported(full_run)
    for name, directory in () if keeps_best else EXPORTED_LAST[step].items():
        assert_consolidated_matches(name, full_run, full_run / directory, tmp_path / name)


EXPORTED_LAST: dict[str, dict[str, str]] = {
    "sft": {"model": "."},
    "reward": {"model": "."},
    "ppo": {"actor": "actor", "critic": "critic"},
}
"""Output directory of the final weights of a step that does not keep the best."""


def read_exported(directory: Path) -> dict[str, bytes]:
    """Return the exported files of a run, by name."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for pattern in ("*.safetensors", "*.json")
        for path in directory.rglob(pattern)
        if "checkpoints" not in path.parts and path.name not in RUN_FILES
    }


RUN_FILES = ("result.json", "samples.json")


def assert_consolidated_matches(name: str, out: Path, directory: Path, consolidated: Path) -> None:
    """Assert that the last checkpoint consolidates to the exported files."""
    checkpoints(["consolidate", str(out / "checkpoints"), str(consolidated), "--model", name])

    files = read_exported(consolidated)
    assert files.keys() >= {"model.safetensors", "config.json", "tokenizer.json"}
    for file, content in files.items():
        expected = (directory / file).read_bytes()
        if file.endswith("config.json"):
            assert parse_config(content) == parse_config(expected), file
        else:
            assert content == expected, file


def parse_config(config: bytes) -> dict[str, Any]:
    """Parse a configuration; lists that stand for sets are sorted."""
    parsed: dict[str, Any] = json.loads(config)
    if "target_modules" in parsed:
        parsed["target_modules"] = sorted(parsed["target_modules"])
    return parsed
