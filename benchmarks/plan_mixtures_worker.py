"""A mixture of `benchmarks.plan_mixtures` on the processes that torchrun started; see there."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.memory import peak_bytes_of
from pipeline.budget.machine import RUNTIME_CPU, Machine
from pipeline.budget.step import memory_by_stage
from pipeline.config import DataConfig, ParallelConfig, TrainedModelConfig
from pipeline.models.embedded import build_tokenizer
from pipeline.parallel.mesh import Mesh, cut_mesh
from pipeline.run import Run
from step1_sft.batches import encode
from step1_sft.config import SFTConfig
from step1_sft.rows import load_rows
from step1_sft.train import learn_from, load_model

LENGTH = 256

LLAMA: Mapping[str, Any] = {
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Mixture:
    """How processes share the model."""

    processes: int
    parallel: ParallelConfig
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rows: int = 1
    """Of a micro-batch."""


MIXTURES: Mapping[str, Mixture] = {
    "pp 2": Mixture(2, ParallelConfig(pp=2), {"zero_stage": 0}),
    "pp 2, gpipe, 4 micro-batches": Mixture(
        2, ParallelConfig(pp=2, schedule="gpipe", micro_batches=4), {"zero_stage": 0}
    ),
    "tp 2": Mixture(2, ParallelConfig(tp=2), {"zero_stage": 0}, rows=4),
    "pp 4": Mixture(4, ParallelConfig(pp=4), {"zero_stage": 0}),
    "pp 2 x tp 2": Mixture(4, ParallelConfig(pp=2, tp=2), {"zero_stage": 0}),
    "pp 2 x shards 2, stage 2": Mixture(4, ParallelConfig(pp=2), {"zero_stage": 2}),
    "tp 2 x shards 2, stage 3": Mixture(4, ParallelConfig(tp=2), {"zero_stage": 3}, rows=4),
    "replicas 2 x shards 2, stage 3, recomputing": Mixture(
        4,
        ParallelConfig(replicas=2),
        {"zero_stage": 3, "gradient_checkpointing": True},
        rows=4,
    ),
}


def save_model(directory: Path) -> None:
    """The model with random weights, and as many rows as a step takes, longer than they may be."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    rows = (
        {"prompt": f"sun {number}", "chosen": "moon and rain " * LENGTH, "rejected": "no"}
        for number in range(256)
    )
    (directory / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def settings(mixture: Mixture, directory: Path) -> SFTConfig:
    """Of a step of eight micro-batches on each pipeline."""
    pipelines = mixture.parallel.pipelines(mixture.processes)
    return SFTConfig(
        output_dir=directory / "out",
        model=TrainedModelConfig(path=str(directory), precision="fp32", **mixture.model),
        data=DataConfig(path=(str(directory / "rows.jsonl"),), max_length=LENGTH, max_eval_rows=4),
        batch_size=8 * pipelines,
        micro_batch_size=mixture.rows,
        parallel=mixture.parallel,
        keep_best=False,
        max_steps=2,
    )


def planned(config: SFTConfig, mesh: Mesh) -> int:
    """Bytes of this process's tensors."""
    world = mesh.world.size
    machine = Machine(world, world, None, None)
    found = memory_by_stage(config.workload(world), machine=machine)
    memory = found[mesh.stages.rank]
    assert not memory.unknown
    return next(each for each in memory.phases if each.name == "train").peak("device") - RUNTIME_CPU


def measured(config: SFTConfig, mesh: Mesh) -> float:
    """The same, weighed in the second step."""
    rows = load_rows(config)
    with Run(config, name="step1_sft", total_steps=2, mesh=mesh) as run:
        sft = load_model(config, rows, run)

        def step(number: int) -> None:
            learn_from(sft, encode(rows.next_rows(), rows.chat, config), run, step=number)

        step(1)
        peak = peak_bytes_of(lambda: step(2))
        return peak + sft.engine.pool.num_bytes  # shared memory, which the profiler doesn't see


def main(argv: Sequence[str]) -> None:
    """Run the case on one process; rank 0 writes what all saw."""
    name, scratch, result = argv
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mixture, directory = MIXTURES[name], Path(scratch)
    if dist.get_rank() == 0:
        save_model(directory)
    dist.barrier()
    parallel = mixture.parallel
    config = settings(mixture, directory)
    with cut_mesh(
        replicas=parallel.replicas, pp=parallel.pp, tp=parallel.tp, timeout_seconds=600.0
    ) as mesh:
        own = planned(config, mesh), measured(config, mesh)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
    if dist.get_rank() == 0:
        ways = zip(*every, strict=True)
        text = json.dumps(dict(zip(("planned", "measured"), ways, strict=True)))
        Path(result).write_text(text)
    dist.barrier()
    # Not by the interpreter's own end: gloo's threads now and then abort there, with all work done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
