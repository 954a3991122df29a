"""Processes that do not do the same end with one sentence, on every rank, and never hang."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipeline.distributed import rank
from pipeline.engine.engine import Engine
from pipeline.engine.shared_memory import DesyncError
from tests.distributed import run_ranks
from tests.pipeline.engine.test_stages import build, loss_of, settings


def engine_of(stage: int) -> Engine:
    return Engine(build("llama", "fp32"), settings(stage, max_norm=None), total_steps=1)


def other_units(stage: int) -> str:
    """Rank 1 leaves out the first block."""
    engine = engine_of(stage)
    if rank() == 1:
        layers = engine.model.model.layers
        del layers[0]
    try:
        engine.backward(loss_of(engine, 0, 0, rank()))
    except DesyncError as error:
        return str(error)
    return "nothing"


def test_ranks_that_run_other_units_are_named() -> None:
    for stage, kind in ((0, "reduce_scatter"), (3, "all_gather")):
        first, second = run_ranks(other_units, stage)

        assert first.startswith(f"rank 0 is at {kind} of model.layers.0")
        assert f"while rank 1 is at {kind} of " in first
        assert first.endswith("all processes must run the same layers in the same order")
        assert second.startswith(f"rank 1 is at {kind} of ")
        assert f"while rank 0 is at {kind} of model.layers.0" in second


def said_by_first_pass(engine: Engine) -> tuple[str, float]:
    """What stops the first pass, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(DesyncError) as stopped:
        loss_of(engine, 0, 0, 0)
    return str(stopped.value), time.monotonic() - start


def late() -> tuple[str, float]:
    """Rank 1 does not take part."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.options._timeout = timedelta(seconds=1)
    engine = engine_of(3)
    if rank() == 1:
        time.sleep(3)
        return "slept", 0.0
    return said_by_first_pass(engine)


def test_a_rank_that_does_not_come_is_named_within_the_timeout() -> None:
    (sentence, seconds), _ = run_ranks(late)

    assert sentence.startswith("rank 0 waited 1 s at all_gather of root")
    assert "for rank 1" in sentence
    assert sentence.endswith("the processes ran different layers, or rank 1 hangs")
    assert seconds < 3


def widowed() -> tuple[str, float]:
    """Rank 1 is killed."""
    engine = engine_of(3)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return said_by_first_pass(engine)


def test_the_end_of_a_rank_is_noticed_at_once() -> None:
    ended = run_ranks(widowed, may_die=(1,))

    sentence, seconds = ended[0]
    assert sentence.startswith("rank 1 ended while rank 0 waited for it at all_gather of root")
    assert seconds < 5
