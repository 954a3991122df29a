"""Strategies against tables of throughput: no machine, no noise but what a table has."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from pipeline.autotune.points import Point, best_of
from pipeline.autotune.space import Candidate, Space, Value, make_space
from pipeline.autotune.strategies import Strategy, next_candidate, usual_trials
from pipeline.budget.machine import GIB, Machine
from step1_sft.config import SFTConfig

SPACE = make_space(SFTConfig(batch_size=16, micro_batch_size=1), Machine(2, 2, 80 * GIB, None))
"""Four stages, offload, recomputing or not, micro-batches of 1 to 8: 72 candidates."""

Settings = Mapping[str, Any]


def seconds(
    settings: Settings, *, launch: float, sharding: float, offload: float, recompute: float
) -> float:
    """Of a step of 16 sequences on two processes, with the costs of each choice."""
    micro_batches = 8 / settings["micro_batch_size"]
    each = 1.0 + (recompute if settings["gradient_checkpointing"] else 0.0)
    moved = sharding * {0: 1.2, 1: 1.0, 2: 1.0, 3: 1.5}[settings["zero_stage"]]
    away = settings["offload"].count("+") * 1.25
    return 8 * each + micro_batches * (launch + moved) + offload * away


def launches_are_slow(settings: Settings) -> float:
    return 1 / seconds(settings, launch=2.0, sharding=0.3, offload=3.0, recompute=0.33)


def links_are_slow(settings: Settings) -> float:
    return 1 / seconds(settings, launch=0.1, sharding=3.0, offload=1.0, recompute=0.33)


def caches_are_small(settings: Settings) -> float:
    """Two sequences at a time are best; more fall out of the cache."""
    spill = {1: 1.0, 2: 1.0, 4: 1.3, 8: 1.6}[settings["micro_batch_size"]]
    return 1 / (seconds(settings, launch=1.0, sharding=0.2, offload=2.0, recompute=0.4) * spill)


def memory_is_short(settings: Settings) -> float | None:
    """Only stage 3 and recomputing have room for four sequences, and nothing for eight."""
    size, recomputes = settings["micro_batch_size"], settings["gradient_checkpointing"]
    most = 1 + (settings["zero_stage"] == 3) + 2 * recomputes
    return launches_are_slow(settings) if size <= most else None


TABLES: tuple[Callable[[Settings], float | None], ...] = (
    launches_are_slow,
    links_are_slow,
    caches_are_small,
    memory_is_short,
)


def measure(
    space: Space, candidate: Candidate, table: Callable[[Settings], float | None], noise: float = 0
) -> Point:
    settings = space.named(candidate)
    speed = table(settings)
    draw = random.Random(repr(candidate))
    rates = tuple((speed or 0.0) * (1 + draw.gauss(0, noise)) for _ in range(4))
    outcome = "out of memory" if speed is None else "measured"
    return Point(
        step="",
        key="",
        settings=settings,
        outcome=outcome,
        tokens_per_second=() if speed is None else rates,
    )


def play(
    table: Callable[[Settings], float | None],
    strategy: Strategy,
    *,
    trials: int,
    points: Sequence[Point] = (),
    seed: int = 1,
    noise: float = 0.0,
) -> list[Point]:
    """Tune, by a table in place of a machine."""
    made = list(points)
    while candidate := next_candidate(SPACE, made, strategy=strategy, trials=trials, seed=seed):
        made.append(measure(SPACE, candidate, table, noise))
    return made


def highest(table: Callable[[Settings], float | None]) -> float:
    return max(table(SPACE.named(each)) or 0.0 for each in SPACE.candidates)


@pytest.mark.parametrize("table", TABLES)
def test_the_model_finds_the_best_in_a_third_of_the_trials(
    table: Callable[[Settings], float | None],
) -> None:
    points = play(table, "model", trials=len(SPACE.candidates) // 3)

    best = best_of(points)
    assert best is not None
    assert table(best.settings) == highest(table)
    assert len(points) <= len(SPACE.candidates) // 3


@pytest.mark.parametrize("table", TABLES)
def test_noise_of_three_percent_costs_no_more_than_three_percent(
    table: Callable[[Settings], float | None],
) -> None:
    points = play(table, "model", trials=len(SPACE.candidates) // 3, noise=0.03)

    best = best_of(points)
    assert best is not None
    assert (table(best.settings) or 0.0) >= 0.97 * highest(table)


@pytest.mark.parametrize("strategy", ["model", "grid", "random"])
def test_the_settings_as_they_are_come_first(strategy: Strategy) -> None:
    space = make_space(SFTConfig(batch_size=8, micro_batch_size=4), Machine(1, 1, None, None))

    first = next_candidate(space, [], strategy=strategy, trials=3, seed=1)

    assert first == (False, 4)


def test_the_grid_takes_everything_in_the_order_of_the_ladder() -> None:
    points = play(launches_are_slow, "grid", trials=usual_trials("grid", len(SPACE.candidates)))

    assert [SPACE.candidate(point.settings) for point in points] == list(SPACE.candidates)


def test_the_grid_leaves_out_what_needs_more_than_there_was() -> None:
    def nothing_fits(settings: Settings) -> float | None:
        return 1.0 if settings["micro_batch_size"] == 1 else None

    points = play(nothing_fits, "grid", trials=1000)

    assert {point.settings["micro_batch_size"] for point in points} == {1, 2}
    assert len(points) == len(SPACE.candidates) // 2


def test_what_lacks_main_memory_rules_out_itself_alone() -> None:
    """Offloaded, the first rung lacks main memory; higher ones share it out, and fit."""
    refused = [each for each in SPACE.candidates if each[:2] == (0, "optimizer+gradients")]

    def tried(**more: Sequence[Candidate]) -> set[tuple[Value, ...]]:
        left = (
            next_candidate(
                SPACE, [], strategy="random", trials=99, seed=n, refused=[start, *refused], **more
            )
            for n in range(200)
        )
        return {each[:2] for each in left if each is not None}

    start = SPACE.start
    assert start is not None
    assert (0, "none") in tried()
    assert (0, "optimizer+gradients") not in tried()
    assert (0, "none") not in tried(too_large=refused)


def test_random_draws_by_the_seed_and_never_twice() -> None:
    def order(seed: int) -> list[Mapping[str, Value]]:
        points = play(launches_are_slow, "random", trials=72, seed=seed)
        return [point.settings for point in points]

    assert order(1) == order(1) != order(2)
    assert sorted(map(str, order(1))) == sorted(map(str, order(2)))
    assert len(order(1)) == 72


@pytest.mark.parametrize("strategy", ["model", "random"])
@pytest.mark.parametrize("cut_off_after", [1, 7])
def test_a_tuning_that_was_cut_off_goes_on_as_if_it_had_not_been(
    strategy: Strategy, cut_off_after: int
) -> None:
    whole = play(memory_is_short, strategy, trials=16, noise=0.02)

    again = play(memory_is_short, strategy, trials=16, points=whole[:cut_off_after], noise=0.02)

    assert again == whole


def test_a_trial_that_failed_is_a_point_and_not_tried_again() -> None:
    killed = Point(
        step="",
        key="",
        settings=SPACE.named(SPACE.candidates[5]),
        outcome="killed",
        message="Killed",
    )

    points = play(launches_are_slow, "model", trials=24, points=[killed])

    tried = [SPACE.candidate(point.settings) for point in points]
    assert len(set(tried)) == len(tried) == 24
    assert best_of(points) in points[1:]


def test_a_third_of_the_candidates_is_tried_but_not_hours() -> None:
    assert usual_trials("model", 10) == 4
    assert usual_trials("random", 72) == 24
    assert usual_trials("model", 2000) == 24
    assert usual_trials("grid", 2000) == 2000
