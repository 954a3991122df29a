"""What a step moves between processes, in which order, and how much is gathered at once."""

from typing import Any

import pytest
import torch

from pipeline.engine import shared_memory
from pipeline.engine.comm import tree_sum
from pipeline.engine.engine import Engine
from pipeline.engine.shared_memory import SharedMemoryCollectives
from pipeline.parallel.group import ALONE
from pipeline.parallel.mesh import current_mesh
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.test_stages import build, loss_of, settings


def sizes(engine: Engine) -> dict[str, int]:
    """Bytes of the fp32 vectors of each unit."""
    return {unit.name: sum(4 * flat.numel for flat in unit.flats) for unit in engine.zero.units}


def moved_in_a_step(stage: int, zero: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    engine = Engine(build("llama", "fp32"), settings(stage, max_norm=1.0, **zero), total_steps=2)
    for step in range(2):
        with engine.comm.log.recording() as log:
            engine.backward(loss_of(engine, step, 0, rank()))
            engine.step()
    return dict(log.num_bytes), sizes(engine)


@pytest.mark.parametrize("zero", [{}, {"shared_memory": False}], ids=["memory", "process group"])
@pytest.mark.parametrize("stage", range(4))
def test_a_step_moves_twice_the_weights_and_at_stage_3_three_times(
    stage: int, zero: dict[str, Any]
) -> None:
    for moved, units in run_ranks(moved_in_a_step, stage, zero):
        whole = sum(units.values())
        # Stage 0 gathers gradients, 1 and 2 weights; 3 weights, twice for each block.
        blocks = sum(size for unit, size in units.items() if "layers" in unit)
        gathered = whole if stage < 3 else whole + blocks
        assert moved["reduce_scatter"] == whole
        assert moved["all_gather"] == gathered
        assert moved["all_reduce"] < 2048  # the norm, of a few fp64 values for each vector


def order_of_a_step() -> tuple[list[tuple[str, str]], list[int], dict[str, int]]:
    """Calls of a step at stage 3, and what was gathered at each moment."""
    model = build("llama", "fp32", num_hidden_layers=4)
    config = settings(3, max_norm=None, shared_memory=False)
    engine = Engine(model, config, total_steps=2)
    held: list[int] = []
    for step in range(2):
        with engine.comm.log.recording() as log:
            loss = loss_of(engine, step, 0, rank())
            engine.backward(loss)
        engine.step()
    for module in model.modules():
        module.register_forward_hook(lambda *_: held.append(engine.zero.gathered_bytes))
    engine.backward(loss_of(engine, 0, 0, rank()))
    order = list(dict.fromkeys(log.order))
    return order, held, sizes(engine)


def test_units_are_gathered_one_ahead_in_the_recorded_order() -> None:
    (order, held, units), _ = run_ranks(order_of_a_step)

    blocks = [f"model.layers.{number}" for number in range(4)]
    gathers = [unit for kind, unit in order if kind == "all_gather"]
    reductions = [unit for kind, unit in order if kind == "reduce_scatter"]
    assert gathers == ["root", "model.embed_tokens", *blocks, "lm_head"]  # the first time each
    assert reductions == ["lm_head", *reversed(blocks), "model.embed_tokens", "root"]
    assert max(held) == units["root"] + 2 * units["model.layers.0"]


def test_the_tree_adds_neighbours_first() -> None:
    # In fp32 1e8 + 1 is 1e8: what is added first decides.
    parts = [torch.tensor([each]) for each in (1e8, 1.0, -1e8, 1.0, 3.0)]
    out = torch.empty(1)

    tree_sum(parts, out=out)

    assert out.item() == (1e8 + -1e8) + 3.0
    tree_sum(parts[1:2], out=out)
    assert out.item() == 1.0


def summed_in(dtype: str, weights: str) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The summed gradients of a micro-batch, and the bytes that were moved."""
    config = settings(2, max_norm=None, shared_memory=False, reduce_dtype=dtype)
    engine = Engine(build("llama", weights), config, total_steps=1)
    with engine.comm.log.recording() as log:
        engine.backward(loss_of(engine, 0, 0, rank()))
        summed = engine.gradients()
    return summed, {"bytes": log.num_bytes["reduce_scatter"]}


def own_gradients(weights: str) -> dict[str, torch.Tensor]:
    """Those of a process alone, in the numbers of its own micro-batch."""
    engine = Engine(build("llama", weights), settings(0, max_norm=None), total_steps=1, group=ALONE)
    engine.backward(loss_of(engine, 0, 0, rank()))
    return engine.gradients()


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_in_bf16_each_process_rounds_its_gradient_and_half_the_bytes_travel(weights: str) -> None:
    (narrow, moved), _ = run_ranks(summed_in, "bf16", weights)
    (_, moved_in_fp32), _ = run_ranks(summed_in, "fp32", weights)
    first, second = run_ranks(own_gradients, weights)

    assert 2 * moved["bytes"] == moved_in_fp32["bytes"]
    for name, gradient in narrow.items():
        rounded = [each[name].bfloat16().float() for each in (first, second)]
        assert torch.equal(gradient, rounded[0] + rounded[1]), name


def test_parts_below_fp32_are_added_in_fp32() -> None:
    # In bf16 256 + 1 is 256.
    parts = [torch.full((70_000,), 256.0).bfloat16(), torch.full((70_000,), 1.0).half()]
    out = torch.empty(70_000)

    tree_sum([*parts, torch.full((70_000,), 0.5)], out=out)

    assert (out == 257.5).all()


def chunked(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An all-gather and a reduce-scatter in many chunks."""
    before, shared_memory.SLOT_BYTES = shared_memory.SLOT_BYTES, 4096
    comm = SharedMemoryCollectives("model", current_mesh().data)
    full = torch.arange(numel, dtype=torch.float32) + 1000 * rank()
    out = torch.empty(numel // 2)
    comm.reduce_scatter(full.clone(), out, "unit").wait()
    comm.all_gather(full, comm.piece(full).clone(), "unit").wait()
    shared_memory.SLOT_BYTES = before
    return out, full


def test_shared_memory_moves_vectors_in_chunks() -> None:
    (first, one), (second, other) = run_ranks(chunked, 10_000)

    assert torch.equal(torch.cat([first, second]), 2 * torch.arange(10_000.0) + 1000)
    assert torch.equal(one, other)
    assert torch.equal(one[5000:], torch.arange(5000.0, 10_000.0) + 1000)
