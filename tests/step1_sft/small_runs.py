"""Short runs of step 1 on tiny models, and how they end."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import DataConfig, OptimConfig, ParallelConfig, TrainedModelConfig
from pipeline.demo.model import build_tokenizer
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.parallel.mesh import cut_mesh
from step1_sft.config import SFTConfig
from step1_sft.train import train
from tests.families import tiny_causal_lm

BLOCKS = {"gpt2": "n_layer"}
"""Families with another name for the number of blocks."""


def make(directory: Path, family: str, *, blocks: int = 3, **changes: Any) -> Path:
    """A tiny random model of three blocks, and forty sums of all lengths."""
    tokenizer = build_tokenizer()
    sizes = {"vocab_size": len(tokenizer), BLOCKS.get(family, "num_hidden_layers"): blocks}
    model = tiny_causal_lm(family, **{**sizes, **changes})
    model.save_pretrained(directory / "base")
    tokenizer.save_pretrained(directory / "base")
    rows = [
        {"prompt": f"Add {n} and 1.", "response": f"It is {'so ' * (n % 7)}{n + 1}."}
        for n in range(40)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def settings(
    start: Path, out: Path, *, pp: int = 1, tp: int = 1, model: Any = None, **changes: Any
) -> SFTConfig:
    """Three steps on them, of three micro-batches each at least."""
    optim = OptimConfig(lr=0.003, schedule="constant", warmup_ratio=0.0, max_grad_norm=0.5)
    own: dict[str, Any] = {
        "parallel": ParallelConfig(pp=pp, tp=tp, micro_batches=3),
        "max_steps": 3,
        "batch_size": 8,
        "micro_batch_size": 8,
    }
    return SFTConfig(
        output_dir=out,
        model=TrainedModelConfig(path=str(start / "base"), **{"optim": optim, **(model or {})}),
        data=DataConfig(path=(str(start / "rows.jsonl"),), max_length=48),
        **{**own, **changes},
    )


def run(config: SFTConfig) -> None:
    """Train on the processes there are, divided as the settings say."""
    parallel = config.parallel
    with cut_mesh(replicas=parallel.replicas, pp=parallel.pp, tp=parallel.tp, timeout_seconds=60.0):
        train(config)


def ended(out: Path) -> dict[str, Any]:
    """Hashes of the files of weights, and what was logged."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "lr", "skipped", "eval_perplexity")
    return {
        "weights": {
            str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(out.rglob("*.safetensors"))
            if "checkpoints" not in file.parts
        },
        "metrics": [{name: line[name] for name in names if name in line} for line in lines],
    }


def saved(out: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint but the random number generators, which are each process's."""
    checkpoint = Checkpoint.open(out / "checkpoints" / f"step_{step:08d}")
    checkpoint.verify()
    keys = [key for key in sorted(checkpoint.keys()) if not key.startswith("random/")]
    found = {key: torch.empty(checkpoint.numel(key), dtype=checkpoint.dtype(key)) for key in keys}
    for key, tensor in found.items():
        checkpoint.read(key, 0, tensor)
    return found


def cut_off(whole: Path, out: Path) -> Path:
    """Output of a run that was killed after its checkpoint of two steps."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "step_00000003")
    (out / "result.json").unlink()
    return out
