"""Processes that do not do the same end with one sentence, on every rank, and never hang."""

import time

import pytest
import torch

from pipeline.engine.engine import Engine
from pipeline.parallel.mesh import current_mesh
from pipeline.system.position import SAME_ORDER, DesyncError
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.test_stages import build, compute_loss, settings


def swapped(stage: int, shared_memory: bool, where: str) -> tuple[str, float, bool]:
    """Rank 1 uses two engines of one model the other way around.

    The message, the seconds until it came, and whether the weights are unchanged.
    """
    config = settings(stage, max_norm=None, shared_memory=shared_memory)
    engines = [Engine(build("llama", "fp32"), config, total_steps=1) for _ in range(2)]
    masters = [master.clone() for engine in engines for master in engine.masters()]
    ordered = engines if rank() == 0 else engines[::-1]
    start = time.monotonic()
    try:
        for number, engine in enumerate(ordered):
            loss = compute_loss(engine, 0, number, 0)
            if where == "update":
                engine.backward(loss)
        if where == "update":
            for engine in ordered:
                engine.step()
        current_mesh().world.sum(1)
    except DesyncError as error:
        said = str(error)
    else:
        said = "nothing"
    seconds = time.monotonic() - start
    for engine in engines:
        engine.discard()  # of a pass that raised
    left = [master for engine in engines for master in engine.masters()]
    return said, seconds, all(map(torch.equal, masters, left))


@pytest.mark.parametrize(
    ("stage", "shared_memory", "where"),
    [
        pytest.param(0, True, "update", id="shared memory"),
        pytest.param(3, True, "update", id="shared memory at stage 3"),
        pytest.param(0, False, "update", id="gloo"),
        pytest.param(3, False, "forward", id="gloo, forward passes alone"),
    ],
)
def test_two_engines_in_another_order_are_named_at_once_and_no_weight_changes(
    stage: int, shared_memory: bool, where: str
) -> None:
    first, second = run_ranks(swapped, stage, shared_memory, where)

    for said, seconds, unchanged in (first, second):
        one, _, other = said.partition(" while rank ")
        assert {("engine 2" in one), ("engine 2" in other)} == {True, False}, said
        assert "(engine" in one
        assert "(engine" in other
        assert said.endswith(SAME_ORDER)
        assert seconds < 10  # of a timeout of 120
        assert unchanged
