"""Short runs of step 1 on tiny models, and their outcomes."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import DataConfig, OptimConfig, ParallelConfig, TrainedModelConfig
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from step1_sft.config import SFTConfig
from step1_sft.train import train
from tests.families import save_base
from tests.staged import hash_weights, train_sharded

run = partial(train_sharded, train)

BLOCKS = {"gpt2": "n_layer"}
"""Families with another name for the number of blocks."""


def write_task(directory: Path, family: str, *, blocks: int = 3, **changes: Any) -> Path:
    """Write a tiny random model of three blocks, and forty sums of different lengths."""
    sizes = {BLOCKS.get(family, "num_hidden_layers"): blocks}
    save_base(directory / "base", family, **{**sizes, **changes})
    rows = [
        {"prompt": f"Add {n} and 1.", "response": f"It is {'so ' * (n % 7)}{n + 1}."}
        for n in range(40)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def make_config(
    task: Path, out: Path, *, pp: int = 1, tp: int = 1, model: Any = None, **changes: Any
) -> SFTConfig:
    """Return settings of three steps with at least three micro-batches each."""
    optim = OptimConfig(lr=0.003, schedule="constant", warmup_ratio=0.0, max_grad_norm=0.5)
    defaults: dict[str, Any] = {
        "parallel": ParallelConfig(pp=pp, tp=tp, micro_batches=3),
        "max_steps": 3,
        "batch_size": 8,
        "micro_batch_size": 8,
    }
    return SFTConfig(
        output_dir=out,
        model=TrainedModelConfig(path=str(task / "base"), **{"optim": optim, **(model or {})}),
        data=DataConfig(path=(str(task / "rows.jsonl"),), max_length=48),
        **{**defaults, **changes},
    )


def outcome(out: Path) -> dict[str, Any]:
    """Return hashes of the weight files, and the logged metrics."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "lr", "skipped", "eval_perplexity")
    return {
        "weights": hash_weights(out),
        "metrics": [{name: line[name] for name in names if name in line} for line in lines],
    }


def read_state(out: Path, step: int) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, without the random number generators of each process."""
    checkpoint = Checkpoint.open(out / "checkpoints" / f"step_{step:08d}")
    checkpoint.verify()
    keys = [key for key in sorted(checkpoint.keys()) if not key.startswith("random/")]
    tensors = {key: torch.empty(checkpoint.numel(key), dtype=checkpoint.dtype(key)) for key in keys}
    for key, tensor in tensors.items():
        checkpoint.read(key, 0, tensor)
    return tensors


def interrupt(full_run: Path, out: Path) -> Path:
    """Copy a run as if it had been killed after its second step's checkpoint."""
    shutil.copytree(full_run, out)
    shutil.rmtree(out / "checkpoints" / "step_00000003")
    (out / "result.json").unlink()
    return out
