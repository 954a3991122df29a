"""A stage knows what has arrived of what it sent, though nobody says so, and keeps no more."""

from collections import Counter
from itertools import product

import pytest

from pipeline.parallel.places import Places, most_sent, on_the_way
from pipeline.parallel.schedules import Instruction, Schedule, orders_of, simulate

CASES = [
    (schedule, stages, count, chunks)
    for (schedule, most), stages, count in product(
        {"gpipe": 1, "1f1b": 1, "interleaved": 3}.items(), (2, 3, 4), (1, 3, 8, 13)
    )
    for chunks in range(1 + (most > 1), most + 1)
]


@pytest.mark.parametrize(("schedule", "stages", "count", "chunks"), CASES)
def test_nothing_is_taken_to_have_arrived_that_has_not(
    schedule: Schedule, stages: int, count: int, chunks: int
) -> None:
    """By the clock: who takes a tensor has begun the pass that it takes it for."""
    orders = orders_of(schedule, stages=stages, count=count, chunks=chunks)
    starts = simulate(orders).starts
    places = Places(orders, chunks=chunks)
    for stage, order in enumerate(orders):
        kept = on_the_way(orders, stage, chunks=chunks)
        sent: list[float] = []
        for each, known in zip(order, kept, strict=True):
            now = starts[stage][each]
            assert known["gradients"] >= sum(taken > now for taken in sent)
            chunk = each.chunk * stages + stage
            if each.kind == "backward" and chunk > 0:
                to, place = places.of("gradients", each.micro_batch, chunk - 1)
                sent.append(starts[to][orders[to][place]])


def test_the_last_of_two_stages_keeps_one_gradient_of_each_kind() -> None:
    """F0 B0 F1 B1 F2 B2, and the other F0 F1 B0 F2 B1 B2: with F2 comes word of B0."""
    orders = orders_of("1f1b", stages=2, count=3)

    found = on_the_way(orders, 1)

    assert [each["gradients"] for each in found] == [0, 0, 1, 1, 1, 1]
    assert found[2] == Counter({"gradients": 1, "tied gradients": 1})
    assert on_the_way(orders, 0) == [Counter()] * 6


def most(schedule: Schedule, stages: int, count: int, chunks: int = 1) -> int:
    """Gradients of a shared weight that the last stage keeps, at most."""
    orders = orders_of(schedule, stages=stages, count=count, chunks=chunks)
    bound = most_sent(schedule, stages)
    found = on_the_way(orders, stages - 1, chunks=chunks, most=bound)
    return max(each["tied gradients"] for each in found)


def test_gradients_of_a_shared_weight_do_not_pile_up_with_micro_batches() -> None:
    for stages, schedule in product((2, 4, 8), ("gpipe", "1f1b")):
        assert most(schedule, stages, 64) <= stages
    assert most("interleaved", 4, 64, 2) == 6


def test_a_stage_hears_of_all_stages_that_a_tensor_came_through() -> None:
    orders = orders_of("1f1b", stages=3, count=4)
    places = Places(orders)

    assert list(places.passed("hidden states", 1, 1)) == [(0, 1), (1, 1)]
    assert list(places.passed("gradients", 0, 1)) == [(1, 2), (2, 1)]
    assert orders[1][2] == Instruction("backward", 0)
