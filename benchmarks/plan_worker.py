"""The cases of `benchmarks.plan` on the processes that torchrun started; see there."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.memory import peak_bytes_of
from pipeline.budget.machine import Machine
from pipeline.budget.step import step_memory
from pipeline.budget.table import Phase
from pipeline.config import DataConfig, Precision, TrainedModelConfig
from pipeline.config.zero import OffloadConfig, ZeroConfig
from pipeline.data.batches import TokenBatch
from pipeline.engine.engine import Engine
from pipeline.models.attention import RAGGED
from pipeline.models.forward import Policy
from step1_sft.config import SFTConfig

Offload = Literal["none", "cpu", "nvme"]
OFFLOADS: tuple[str, ...] = get_args(Offload)

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "opt": {"hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 1024},
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 4},
    "llama": {"hidden_size": 256, "intermediate_size": 704, "num_key_value_heads": 2},
    "qwen3": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
"""What the models have beside 4 layers of 4 heads and 4,096 words."""

COMMON = {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512}
ROWS, LENGTH, WORDS = 2, 128, 4096

KINDS = ("weights", "masters", "moments", "gradients", "gradient_buffers", "pass", "step")
"""`pass` is what comes and goes in a micro-batch, `step` the highest moment of all."""

PASS = ("activations", "logits", "gathered")
NOT_MEASURED = ("best", "runtime")
"""What the engine doesn't hold."""


def compare(
    family: str,
    stage: int,
    offload: str,
    precision: Precision,
    directory: Path,
) -> dict[str, dict[str, float]]:
    """Predicted and measured bytes of this process, by kind."""
    shape = AutoConfig.for_model(
        family, **{**({} if family == "gpt2" else COMMON), **SHAPES[family]}, vocab_size=WORDS
    )
    for name in [name for name in vars(shape) if "drop" in name]:
        setattr(shape, name, 0.0)
    path = directory / f"{family}-{dist.get_rank()}"
    shape.bos_token_id = shape.eos_token_id = 0
    shape.save_pretrained(path)
    places: dict[str, Any] = {"none": {}, "cpu": {"optimizer": "cpu", "gradients": "cpu"}}.get(
        offload, {"optimizer": "nvme", "params": "nvme" if stage == 3 else "none"}
    )
    zero = ZeroConfig(offload=OffloadConfig(**places, nvme_path=directory))
    settings = TrainedModelConfig(
        path=str(path),
        precision=precision,
        zero_stage=stage,  # pyright: ignore[reportArgumentType]
        zero=zero,
    )
    config = SFTConfig(
        model=settings,
        data=DataConfig(max_length=LENGTH),
        batch_size=2 * ROWS * dist.get_world_size(),
        micro_batch_size=ROWS,
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    model.set_attn_implementation(RAGGED)
    return {"predicted": predicted(config), "measured": measured(model.train(), settings)}


def predicted(config: SFTConfig) -> dict[str, float]:
    """By the plan."""
    world = dist.get_world_size()
    memory = step_memory(config, machine=Machine(world, world, None, None))
    assert not memory.unknown
    train = next(phase for phase in memory.phases if phase.name == "train")
    sizes = train.by_kind("device")
    kinds: dict[str, float] = {kind: sizes.get(kind, 0) for kind in KINDS[:-2]}
    passing = tuple(item for item in train.items if item.kind in PASS)
    kinds["pass"] = Phase("train", passing).peak("device")
    kinds["step"] = train.peak("device") - sum(sizes.get(kind, 0) for kind in NOT_MEASURED)
    return kinds


def measured(model: nn.Module, settings: TrainedModelConfig) -> dict[str, float]:
    """By weighing."""
    engine = Engine(Policy(model), settings, total_steps=4)
    ids = torch.randint(0, WORDS, (ROWS * LENGTH,))
    # All but the first token of each sequence are targets.
    targets = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)[:, 1:].flatten()
    batch = TokenBatch(ids, (LENGTH,) * ROWS, targets)

    def pass_() -> None:
        engine.backward(-engine(batch, uniform=True).logprobs.sum() / (2 * len(targets)))

    def step() -> None:
        pass_()
        pass_()
        engine.step()

    step()
    whole = peak_bytes_of(step)
    pass_()
    before = peak_bytes_of(lambda: None)
    taken = peak_bytes_of(pass_) - before
    groups = engine.groups
    gradients = sum(each.nbytes for group in groups for each in group.gradients.sum.tensors())
    buffers = engine.pool.num_bytes
    engine.step()
    flats = [flat for unit in engine.zero.units for flat in unit.flats]
    return {
        "weights": sum(
            (flat.shard if flat.placement.shard_params else flat.full).nbytes for flat in flats
        ),
        "masters": sum(each.nbytes for group in groups for each in group.masters.beside()),
        "moments": sum(each.nbytes for group in groups for each in group.moments()),
        "gradients": gradients,
        "gradient_buffers": buffers,
        "pass": taken,
        "step": whole + buffers,  # the profiler doesn't see shared memory
    }


def main(argv: Sequence[str]) -> None:
    """Run the cases on one process; rank 0 writes what it saw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--stages", nargs="+", type=int, required=True)
    parser.add_argument("--offloads", nargs="+", required=True)
    parser.add_argument("--precisions", nargs="+", required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for family, stage, offload, precision in product(
            args.models, args.stages, args.offloads, args.precisions
        ):
            case = {"family": family, "stage": stage, "offload": offload, "precision": precision}
            rows.append(case | compare(family, stage, offload, precision, Path(scratch)))
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(rows))
    dist.barrier()
    # Not by the interpreter's own end: gloo's threads now and then abort there, with all work done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
