"""Processes that run different operations raise on every rank instead of hanging."""

import time

import pytest
import torch

from pipeline.engine.engine import Engine
from pipeline.parallel.mesh import current_mesh
from pipeline.system.position import SAME_ORDER, DesyncError
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.test_stages import build, compute_loss, settings


def run_swapped_engines(stage: int, where: str) -> tuple[str, float, bool]:
    """Use two engines of one model in opposite order on rank 1.

    Returns the error, the seconds until it was raised, and whether the weights are unchanged.
    """
    config = settings(stage, max_norm=None)
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
        message = str(error)
    else:
        message = "no error"
    seconds = time.monotonic() - start
    for engine in engines:
        engine.discard()  # of a pass that raised
    final_masters = [master for engine in engines for master in engine.masters()]
    return message, seconds, all(map(torch.equal, masters, final_masters))


@pytest.mark.parametrize(
    ("stage", "where"),
    [
        pytest.param(0, "update", id="update"),
        pytest.param(3, "update", id="update at stage 3"),
        pytest.param(3, "forward", id="forward passes alone"),
    ],
)
def test_engines_in_different_order_raise_without_changing_weights(stage: int, where: str) -> None:
    first, second = run_ranks(run_swapped_engines, stage, where)

    for message, seconds, unchanged in (first, second):
        first_rank, _, second_rank = message.partition(" while rank ")
        assert {("engine 2" in first_rank), ("engine 2" in second_rank)} == {True, False}, message
        assert "(engine" in first_rank
        assert "(engine" in second_rank
        assert message.endswith(SAME_ORDER)
        assert seconds < 10  # of a timeout of 120
        assert unchanged
