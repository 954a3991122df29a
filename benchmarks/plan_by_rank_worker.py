"""The cases of `benchmarks.plan_by_rank`, on the processes that torchrun started; see there."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.heap import peak_bytes_of
from benchmarks.plan_worker import NOT_MEASURED
from pipeline.budget.machine import Machine
from pipeline.budget.step import memory_by_stage
from pipeline.config import DataConfig, LoraConfig, ParallelConfig, Precision, TrainedModelConfig
from pipeline.data.batches import TokenBatch
from pipeline.engine.copies import CollectivesOverCopies
from pipeline.models.attention import RAGGED
from pipeline.models.forward import Policy
from pipeline.models.passes import Passes, passes_of
from pipeline.models.trained import adapted, prepared
from pipeline.next_token import next_token_nll
from pipeline.parallel.mesh import cut_mesh
from step1_sft.config import SFTConfig


@dataclass(frozen=True)
class Case:
    """How the processes of a job share a model."""

    processes: int

    parallel: Mapping[str, Any]
    """Fields of `ParallelConfig`."""

    stage: int = 0
    """ZeRO's."""

    recomputes: bool = False

    double_quant: bool | None = None
    """Over a base in nf4, with adapters of rank 8, how scales are kept; None trains all weights."""

    tied: bool = False
    """Whether the output matrix is the embedding."""


INTERLEAVED = {"pp": 2, "schedule": "interleaved", "chunks": 2}

CASES: Mapping[str, Case] = {
    "pp 2": Case(2, {"pp": 2}),
    "pp 2, gpipe": Case(2, {"pp": 2, "schedule": "gpipe"}),
    "pp 2, interleaved": Case(2, INTERLEAVED),
    "pp 2, recomputing": Case(2, {"pp": 2}, recomputes=True),
    "pp 2, tied": Case(2, {"pp": 2}, tied=True),
    "tp 2": Case(2, {"tp": 2}),
    "pp 4": Case(4, {"pp": 4}),
    "pp 4, tied": Case(4, {"pp": 4}, tied=True),
    "pp 2 x tp 2": Case(4, {"pp": 2, "tp": 2}),
    "pp 2 x tp 2, interleaved": Case(4, {"tp": 2, **INTERLEAVED}),
    "pp 2 x shards 2": Case(4, {"pp": 2}, stage=2),
    "pp 2 x replicas 2": Case(4, {"pp": 2, "replicas": 2}, stage=1),
    "tp 2 x shards 2": Case(4, {"tp": 2}, stage=3),
    "replicas 2 x shards 2": Case(4, {"replicas": 2}, stage=3),
    "tp 2, nf4": Case(2, {"tp": 2}, double_quant=False),
    "tp 2, nf4, double": Case(2, {"tp": 2}, double_quant=True),
    "tp 2 x shards 2, nf4": Case(4, {"tp": 2}, stage=3, double_quant=False),
    "pp 2 x tp 2, nf4": Case(4, {"pp": 2, "tp": 2}, double_quant=False),
}


@dataclass(frozen=True)
class Shape:
    """Of a Llama, and of what it learns from."""

    hidden: int = 512
    blocks: int = 8
    words: int = 8192
    length: int = 256

    rows: int = 2
    """Of a micro-batch."""

    count: int = 8
    """Micro-batches of a step on each data process."""

    precision: Precision = "fp32"

    def config(self, *, tied: bool) -> LlamaConfig:
        """The model's; `tied` says whether the output matrix is the embedding."""
        return LlamaConfig(
            vocab_size=self.words,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.blocks,
            num_attention_heads=8,
            max_position_embeddings=self.length,
            tie_word_embeddings=tied,
            use_cache=False,
        )


@dataclass(frozen=True)
class Peak:
    """Most bytes that a process takes in a step."""

    planned: float
    measured: float


def peak_of(case: Case, shape: Shape, directory: Path) -> Peak:
    """Of this process; all of a job that has as many as the case call it."""
    settings = shape.config(tied=case.tied)
    config = settings_of(case, shape, directory / f"model-{dist.get_rank()}")
    axes = {name: case.parallel.get(name, 1) for name in ("replicas", "pp", "tp")}
    with cut_mesh(**axes, timeout_seconds=600.0) as mesh:
        dtype = torch.bfloat16 if shape.precision == "bf16" else torch.float32
        plain = LlamaForCausalLM._from_config(settings, dtype=dtype)  # noqa: SLF001
        plain.set_attn_implementation(RAGGED)
        has_adapters = config.model.lora is not None
        model = adapted(plain, config.model, task="causal", seed=0) if has_adapters else plain
        passes = passes_of(
            prepared(model, config.model),
            config.model,
            config.parallel,
            mesh,
            Policy,
            total_steps=10,
            name="engine",
        )
        return Peak(planned(config, mesh.stages.rank), measured(passes, shape))


def settings_of(case: Case, shape: Shape, directory: Path) -> SFTConfig:
    """Step 1 as the case has it, of a model whose configuration is written to `directory`."""
    shape.config(tied=case.tied).save_pretrained(directory)
    parallel = ParallelConfig(**case.parallel, micro_batches=shape.count)
    model = TrainedModelConfig(
        path=str(directory),
        precision=shape.precision,
        zero_stage=case.stage,  # pyright: ignore[reportArgumentType]
        gradient_checkpointing=case.recomputes,
        **_quantized(case),
    )
    return SFTConfig(
        model=model,
        data=DataConfig(max_length=shape.length),
        batch_size=shape.count * shape.rows * parallel.pipelines(case.processes),
        micro_batch_size=shape.rows,
        parallel=parallel,
    )


def _quantized(case: Case) -> dict[str, Any]:
    """What a case adds to the settings of its model."""
    if case.double_quant is None:
        return {}
    return {"lora": LoraConfig(rank=8), "quantize": "nf4", "double_quant": case.double_quant}


def planned(config: SFTConfig, stage: int) -> float:
    """By the plan, of training on a stage of the pipeline."""
    world = dist.get_world_size()
    machine = Machine(world, world, None, None)
    memory = memory_by_stage(config.workload(world), machine=machine)[stage]
    assert not memory.unknown
    train = next(phase for phase in memory.phases if phase.name == "train")
    sizes = train.by_kind("device")
    return train.peak("device") - sum(sizes.get(kind, 0) for kind in NOT_MEASURED)


def measured(passes: Passes, shape: Shape) -> float:
    """In the second step of two."""
    engine = passes.engine
    tokens = shape.rows * shape.length
    targets = torch.arange(tokens).view(shape.rows, shape.length)[:, 1:].flatten()
    lengths = (shape.length,) * shape.rows
    shared = 0

    def step() -> None:
        nonlocal shared
        ids = torch.randint(0, shape.words, (shape.count, tokens))
        passes.learn(
            [TokenBatch(each, lengths, targets) for each in ids],
            lambda batch: next_token_nll(engine(batch, uniform=True).logprobs),
            divisor=len(targets) * shape.count,
        )
        # Not the heap's: buffers of gradients, and of their sums over copies of the model.
        shared = engine.pool.num_bytes if engine.comm.starts_zero else 0
        if isinstance(engine.comm, CollectivesOverCopies):
            shared += engine.comm.num_bytes
        engine.step()

    step()
    return peak_bytes_of(step) + shared


def main(argv: Sequence[str]) -> None:
    """Take one case on this process, and write what it found below its rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    peak = peak_of(CASES[args.case], Shape(**args.shape), args.result)
    (args.result / f"{dist.get_rank()}.json").write_text(json.dumps(asdict(peak)))
    dist.barrier()
    # Not by the interpreter's own end: gloo's threads now and then abort there, with all work done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
