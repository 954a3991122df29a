"""A slow process is named with its factor; the others' waiting doesn't count."""

import re
import statistics
import time

import pytest
import torch

from pipeline.engine.engine import Engine
from pipeline.parallel.mesh import current_mesh
from pipeline.watchdog.stragglers import WINDOW, Stragglers, medians_of_others, slow_ranks
from tests.distributed import rank
from tests.jobs import run_job
from tests.pipeline.engine.test_stages import build, loss_of, settings


def slow(*seconds: list[float]) -> dict[int, float]:
    return slow_ranks(torch.tensor(seconds, dtype=torch.float64))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_the_median_of_the_others_is_that_of_a_list_without_the_rank(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    seconds = torch.randint(0, 5, (ranks, WINDOW), generator=generator).double()  # with ties

    by_hand = [
        [statistics.median([*column[:rank], *column[rank + 1 :]]) for column in seconds.T.tolist()]
        for rank in range(ranks)
    ]
    assert medians_of_others(seconds).tolist() == by_hand


def test_a_rank_is_slow_that_takes_half_as_long_again_in_18_of_20_steps() -> None:
    usual = [1.0] * 20
    cases: list[tuple[list[float], dict[int, float]]] = [
        ([1.8] * 20, {1: 1.8}),
        ([1.5] * 20, {1: 1.5}),
        ([1.4999] * 20, {}),
        ([1.2] * 20, {}),
        ([1.0] * 2 + [1.5] * 18, {1: 1.5}),
        ([1.0] * 3 + [9.0] * 17, {}),
    ]

    assert WINDOW == 20
    for own, expected in cases:
        assert slow(usual, own) == expected, own
        assert slow(usual, own, usual) == expected, own
    # The median of the others counts: what a slower one takes excuses nobody.
    assert slow(usual, [1.5] * 20, usual, [9.0] * 20) == {1: 1.5, 3: 9.0}


def test_a_pause_of_one_step_is_no_straggler() -> None:
    assert slow([1.0] * WINDOW, [50.0] + [1.0] * (WINDOW - 1)) == {}


def test_two_moments_of_speed_excuse_nobody() -> None:
    assert slow([1.0] * WINDOW, [0.5] * 2 + [2.0] * (WINDOW - 2)) == {1: 2.0}


def sleeping(seconds: tuple[float, float], steps: int) -> None:
    """Each rank computes for so long in a step, and they meet twice."""
    stragglers = Stragglers(current_mesh().world)
    for step in range(1, steps + 1):
        current_mesh().world.sum(1)
        time.sleep(seconds[rank()])
        current_mesh().world.sum(1)
        stragglers.end_step(step)


def four(seconds: tuple[float, ...], stages: int) -> None:
    stragglers = Stragglers(current_mesh().world, stages=stages)
    for step in range(1, WINDOW + 1):
        time.sleep(seconds[rank()])
        current_mesh().world.sum(1)
        stragglers.end_step(step)


@pytest.mark.jobs
def test_processes_are_compared_with_those_of_their_stage() -> None:
    # The second stage takes thrice as long, and of its processes the last.
    job = run_job(four, (0.02, 0.02, 0.06, 0.18), 2, world_size=4)

    assert job.codes == [0] * 4
    (line,) = job.errors.splitlines()
    assert "rank 3 takes" in line


@pytest.mark.jobs
def test_a_slow_rank_is_reported_once() -> None:
    job = run_job(sleeping, (0.03, 0.09), 2 * WINDOW)

    assert job.codes == [0, 0]
    (line,) = job.errors.splitlines()
    said = re.search(r"rank 1 takes (\S+) x the others' time since step 1 \(host \S+\)$", line)
    assert said is not None
    assert 2 < float(said[1]) < 3.5


def test_there_is_no_alarm_at_a_factor_of_1_2() -> None:
    job = run_job(sleeping, (0.05, 0.06), WINDOW)

    assert (job.codes, job.errors) == ([0, 0], "")


def training(shared_memory: bool) -> None:
    engine = Engine(
        build("llama", "fp32"),
        settings(3, max_norm=None, shared_memory=shared_memory),
        total_steps=WINDOW,
    )
    stragglers = Stragglers(current_mesh().world)
    for step in range(1, WINDOW + 1):
        if rank() == 1:
            time.sleep(0.2)
        engine.backward(loss_of(engine, 0, 0, rank()))
        engine.step()
        stragglers.end_step(step)


@pytest.mark.jobs
@pytest.mark.parametrize(
    "shared_memory",
    [
        pytest.param(True, id="shared memory"),
        pytest.param(False, id="gloo", marks=pytest.mark.faults),
    ],
)
def test_waiting_for_the_slow_rank_in_the_engine_does_not_count(shared_memory: bool) -> None:
    job = run_job(training, shared_memory)

    assert job.codes == [0, 0]
    (line,) = job.errors.splitlines()
    assert "rank 1 takes" in line
