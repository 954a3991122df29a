"""A checkpoint of any ZeRO stage resumes at any other stage on any number of processes."""

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import Kernels, LoraConfig, OptimConfig, TrainedModelConfig
from pipeline.config.model import OffloadConfig, ZeroConfig
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import Columns
from pipeline.engine.checkpoint.state import (
    describe,
    frozen_fragments,
    list_fragments,
    load,
    read_shard,
    trained_fragments,
)
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.engine.engine import Engine
from pipeline.engine.sharding.tensor_parallel import ParamShard
from pipeline.models.adapters.lora import add_lora
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.system.errors import CheckpointError
from tests.distributed import rank, run_ranks, world_size
from tests.pipeline.engine.test_invariance import digest
from tests.pipeline.engine.test_stages import build, compute_loss

MICRO_BATCHES = 4
"""In each step, for any number of processes."""

WORLDS = (1, 2, 4)
STAGES = (0, 1, 2, 3)


def settings(
    stage: int, *, optim: OptimConfig | None = None, kernels: Kernels = "auto", **zero: Any
) -> TrainedModelConfig:
    return TrainedModelConfig(
        kernels=kernels,
        zero_stage=stage,
        zero=ZeroConfig(reduction="deterministic", **zero),
        optim=optim or OptimConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=3),
    )


def engine_at(stage: int, dtype: str = "bf16", **changes: Any) -> Engine:
    return Engine(build("llama", dtype), settings(stage, **changes), total_steps=4)


def train(engine: Engine, steps: range) -> list[float]:
    """Train on micro-batch i on rank i modulo the world size, and return the gradient norms."""
    norms: list[float] = []
    for step in steps:
        for micro_batch in range(rank(), MICRO_BATCHES, world_size()):
            engine.backward(compute_loss(engine, step, micro_batch, 0))
        norms.append(engine.step().grad_norm)
    return norms


def weights(engine: Engine) -> dict[str, Tensor]:
    with engine.gathered():
        return {name: param.detach().clone() for name, param in engine.model.named_parameters()}


def save(engine: Engine, root: Path) -> None:
    writer = CheckpointWriter(root, job="test", rank=rank(), world_size=world_size())
    base = None
    if describe(engine)["frozen"]:
        base = "base-test"
        writer.save_base(base, frozen_fragments(engine, "model"))
    writer.save(2, trained_fragments(engine, "model"), describe(engine), base=base)
    writer.wait()
    assert writer.failure is None


def resume(engine: Engine, root: Path) -> None:
    checkpoint = Checkpoint.open(root / "step_00000002")
    load(engine, "model", checkpoint, checkpoint.state)


def save_at_every_stage(root: str) -> None:
    for stage in STAGES:
        engine = engine_at(stage)
        train(engine, range(2))
        save(engine, Path(root) / f"stage {stage} of {world_size()}")


def resume_from(
    root: str, sources: list[tuple[int, int]], stages: tuple[int, ...]
) -> dict[str, tuple[str, list[float]]]:
    """Return a digest of the weights, and the norms, two steps after resuming from each state."""
    results: dict[str, tuple[str, list[float]]] = {}
    for (source, world), stage in product(sources, stages):
        engine = engine_at(stage)
        resume(engine, Path(root) / f"stage {source} of {world}")
        norms = train(engine, range(2, 4))
        results[f"from stage {source} of {world} to {stage}"] = digest(weights(engine)), norms
    return results


SOME = [(0, 1), (3, 2), (1, 4)]
ALL = list(product(STAGES, WORLDS))


@pytest.mark.parametrize(
    ("sources", "stages"),
    [
        pytest.param(SOME, (0, 3), id="some"),
        pytest.param(ALL, STAGES, id="all", marks=pytest.mark.faults),
    ],
)
def test_checkpoint_resumes_at_any_stage_on_any_number_of_processes(
    sources: list[tuple[int, int]], stages: tuple[int, ...], tmp_path: Path
) -> None:
    for world in WORLDS:
        run_ranks(save_at_every_stage, str(tmp_path), world_size=world)
    uninterrupted = engine_at(0)
    norms = train(uninterrupted, range(4))[2:]
    expected = digest(weights(uninterrupted)), norms

    for world in WORLDS:
        for results in run_ranks(resume_from, str(tmp_path), sources, stages, world_size=world):
            assert len(results) == len(sources) * len(stages)
            assert {name for name, result in results.items() if result != expected} == set()


@pytest.mark.parametrize("optimizer", ["none", "nvme"])
def test_state_before_the_first_step_resets_moments(optimizer: str, tmp_path: Path) -> None:
    engine = engine_at(3, offload=OffloadConfig(optimizer=optimizer, nvme_path=tmp_path))
    save(engine, tmp_path)
    expected = train(engine, range(2)), digest(weights(engine))

    resume(engine, tmp_path)

    assert (train(engine, range(2)), digest(weights(engine))) == expected


def test_checkpoint_of_a_different_model_raises(tmp_path: Path) -> None:
    engine = engine_at(0)
    train(engine, range(1))
    save(engine, tmp_path)
    adapted = add_lora(build("llama", "bf16"), LoraConfig(rank=2), task="causal", seed=1)

    with pytest.raises(CheckpointError, match=r"has no trained .*lora_A.*, but the model has"):
        resume(Engine(adapted, settings(0), total_steps=4), tmp_path)


@pytest.mark.parametrize(("shape", "dim"), [((8, 4), 0), ((4, 8), 1), ((3, 8, 2), 1), ((16,), 0)])
@pytest.mark.parametrize("intervals", [1, 2])
def test_fragments_of_shards_map_to_the_full_parameter(
    shape: tuple[int, ...], dim: int, intervals: int
) -> None:
    full = torch.arange(torch.Size(shape).numel())
    width = shape[dim] // intervals // 2
    starts = [[width * (2 * i + part) for i in range(intervals)] for part in range(2)]
    specs = tuple(ShardSpec(dim, tuple(Shard(i, i + width) for i in row)) for row in starts)
    restored = torch.full_like(full, -1)
    for part in range(2):
        shard = ParamShard(torch.Size(shape), specs, part)
        flat = shard.spec.extract(full.view(shape)).reshape(-1)
        for start, stop in pairwise((0, 1, len(flat) // 2 + 1, len(flat))):
            for fragment in list_fragments("w", shard, start, flat[start:stop]):
                columns = fragment.columns or Columns(0, len(full), len(full))
                end = fragment.start + len(fragment.tensor)
                restored[columns.positions(fragment.start, end)] = fragment.tensor
            out = torch.empty_like(flat[start:stop])
            read_shard(shard, start, out, lambda i, to: to.copy_(full[i : i + len(to)]))
            assert torch.equal(out, flat[start:stop])

    assert torch.equal(restored, full)
