"""Volume of communication in a step, and the order of additions."""

from collections import Counter

import pytest
import torch

from pipeline.engine.comm.collectives import tree_sum
from pipeline.engine.engine import Engine
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.test_stages import build, compute_loss, settings


def count_moved_bytes(stage: int) -> tuple[dict[str, int], dict[str, int]]:
    engine = Engine(build("llama", "fp32"), settings(stage, max_norm=1.0), total_steps=2)
    moved, enter = Counter[str](), engine.comm.enter

    def count(kind: str, unit: str, num_bytes: int) -> None:
        moved[kind] += num_bytes
        enter(kind, unit, num_bytes)

    engine.comm.enter = count
    for step in range(2):
        moved.clear()
        engine.backward(compute_loss(engine, step, 0, rank()))
        engine.step()
    return dict(moved), {
        unit.name: sum(4 * flat.numel for flat in unit.flats) for unit in engine.zero.units
    }


@pytest.mark.parametrize("stage", range(4))
def test_step_moves_the_weights_twice_and_at_stage_3_three_times(stage: int) -> None:
    for moved, units in run_ranks(count_moved_bytes, stage):
        total = sum(units.values())
        # Stage 0 gathers gradients, stages 1 and 2 weights; stage 3 gathers blocks twice.
        blocks = sum(size for unit, size in units.items() if "layers" in unit)
        gathered = total if stage < 3 else total + blocks
        assert moved["reduce_scatter"] == total
        assert moved["all_gather"] == gathered
        assert moved["all_reduce"] < 2048  # the norm, of a few fp64 values for each vector


def test_tree_sum_adds_adjacent_tensors_first() -> None:
    # In fp32 1e8 + 1 is 1e8, so the order of additions matters.
    tensors = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0, 3.0)]
    out = torch.empty(1)

    tree_sum(tensors, out=out)

    assert out.item() == (1e8 + -1e8) + 3.0
    tree_sum(tensors[1:2], out=out)
    assert out.item() == 1.0
