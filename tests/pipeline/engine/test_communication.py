"""What a step moves between processes, in which order, and how much is gathered at once."""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.config import ZeroConfig
from pipeline.engine.collectives import make_collectives
from pipeline.engine.comm import tree_sum
from pipeline.engine.engine import Engine
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


def gathers_of_a_step(prefetch_units: int) -> list[str]:
    model = build("llama", "fp32", num_hidden_layers=3)
    zero = {"shared_memory": False, "prefetch_units": prefetch_units}
    engine = Engine(model, settings(3, max_norm=None, weight_decay=0.0, **zero), total_steps=2)
    for step in range(2):
        with engine.comm.log.recording() as log:
            engine.backward(loss_of(engine, step, 0, rank()))
    return [unit for kind, unit in log.order if kind == "all_gather"]


@pytest.mark.parametrize("prefetch_units", [0, 1, 2])
def test_prefetch_changes_neither_the_number_of_gathers_nor_their_units(
    prefetch_units: int,
) -> None:
    blocks = [f"model.layers.{number}" for number in range(3)]

    gathers, _ = run_ranks(gathers_of_a_step, prefetch_units)

    # The root is the norm behind the blocks. The head stays until its backward pass is over, which
    # that of an embedding does without the weight.
    assert gathers == ["root", "model.embed_tokens", *blocks, "lm_head", *reversed(blocks)]


def calls_of_a_micro_batch(optimizer: str) -> list[tuple[str, str]]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 80}
    config = settings(3, max_norm=None, weight_decay=0.1, shared_memory=False)
    config = replace(config, optim=replace(config.optim, name=optimizer))
    engine = Engine(build("llama", "fp32", **sizes), config, total_steps=1)
    with engine.comm.log.recording() as log:
        engine.backward(loss_of(engine, 0, 0, rank()))
    return [(kind, unit) for kind, unit in log.order if unit.startswith("model.layers.")]


@pytest.mark.parametrize(
    ("optimizer", "calls"), [("AdamW", 240), pytest.param("Adam", 480, marks=pytest.mark.grid)]
)
def test_a_block_is_gathered_twice_and_reduced_once_though_weight_decay_spares_its_norms(
    optimizer: str, calls: int
) -> None:
    order, _ = run_ranks(calls_of_a_micro_batch, optimizer)

    assert Counter(kind for kind, _ in order) == {
        "all_gather": 2 * calls // 3,
        "reduce_scatter": calls // 3,
    }


def sums_in_a_row() -> list[float]:
    """Sums of numbers that change from one to the next, each rank the late one in turn."""
    comm = make_collectives(torch.device("cpu"), ZeroConfig(), current_mesh().data, name="model")
    sums = []
    for number in range(400):
        if number % 2 == rank():
            time.sleep(5e-4)  # the other waits; this one reads first, and writes the next at once
        values = torch.tensor([number * 10.0 + rank()], dtype=torch.float64)
        comm.all_reduce(values)
        sums.append(values.item())
    return sums


def test_a_sum_is_that_of_its_own_numbers_however_far_ahead_a_rank_is() -> None:
    expected = [number * 20.0 + 1 for number in range(400)]

    assert run_ranks(sums_in_a_row) == [expected, expected]


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
