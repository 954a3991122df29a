"""The formula of what a step moves, against what the engine's log counts."""

from typing import Any

import pytest
import torch

from pipeline.engine.engine import Engine
from pipeline.engine.predict import unit_vectors
from pipeline.engine.volumes import Volumes, step_volumes
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.test_stages import build, loss_of, settings

CPU = torch.device("cpu")
LOADS = [(stage, micro_batches) for stage in range(4) for micro_batches in (1, 3)]


def counted(family: str, dtype: str, zero: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Bytes reduced and gathered in a step, and gathered in a pass without gradients."""
    found: list[tuple[int, int, int]] = []
    for stage, micro_batches in LOADS:
        engine = Engine(build(family, dtype), settings(stage, max_norm=1.0, **zero), total_steps=2)
        for step in range(2):
            with engine.comm.log.recording() as log:
                for micro_batch in range(micro_batches):
                    engine.backward(loss_of(engine, step, micro_batch, rank()))
                engine.step()
        moved = log.num_bytes["reduce_scatter"], log.num_bytes["all_gather"]
        with torch.no_grad(), engine.comm.log.recording() as log:
            loss_of(engine, 0, 0, rank())
        found.append((*moved, log.num_bytes["all_gather"]))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("zero", [{}, {"shared_memory": False}], ids=["memory", "process group"])
@pytest.mark.parametrize(("family", "dtype"), [("llama", "fp32"), ("gpt2", "bf16")])
def test_a_step_moves_what_the_formula_says(
    family: str, dtype: str, zero: dict[str, Any], world_size: int
) -> None:
    model = build(family, dtype)
    expected: list[tuple[int, int, int]] = []
    for stage, micro_batches in LOADS:
        config = settings(stage, max_norm=1.0, **zero)
        moved = step_volumes(
            model, config, world=world_size, device=CPU, micro_batches=micro_batches
        )
        units = unit_vectors(model, config, world=world_size) if stage == 3 else []
        of_a_pass = sum(vector.num_bytes for unit in units for vector in unit)
        expected.append((moved.reduce_scatter, moved.all_gather, of_a_pass))

    for found in run_ranks(counted, family, dtype, zero, world_size=world_size):
        assert found == expected


def test_a_ring_sends_all_but_the_own_piece() -> None:
    assert Volumes(reduce_scatter=800, all_gather=400).sent(4) == 900
    assert Volumes(reduce_scatter=800, all_gather=400).sent(1) == 0


def test_gradients_are_moved_in_fp32_and_weights_in_their_own_format() -> None:
    with torch.device("meta"):
        model = build("llama", "bf16", hidden_size=512, intermediate_size=1024)
    weights = sum(param.numel() for param in model.parameters())

    moved = [
        step_volumes(
            model,
            settings(stage, max_norm=None, shared_memory=False),
            world=64,
            device=CPU,
            micro_batches=2,
        )
        for stage in range(4)
    ]

    # Two reductions of 4 bytes a weight. The root, which is gathered once, is a fiftieth of all.
    assert [round(each.reduce_scatter / weights, 1) for each in moved] == [8.0] * 4
    assert [round(each.all_gather / weights, 1) for each in moved] == [4.0, 2.0, 2.0, 7.9]
