import random

import pytest

from pipeline.data.packing import pack


def test_each_goes_where_the_least_room_is_left() -> None:
    groups = pack([6, 5, 4, 3, 2], capacity=10)

    assert groups == [[0, 2], [1, 3, 4]]


def test_equal_lengths_keep_their_order() -> None:
    assert pack([5, 5, 5, 5, 5], capacity=10) == [[0, 1], [2, 3], [4]]


def test_nothing_packs_into_nothing() -> None:
    assert pack([], capacity=8) == []


@pytest.mark.parametrize("length", [0, 9])
def test_a_length_that_can_not_fit_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"length {length} of item 1 is not between 1 and 8"):
        pack([3, length], capacity=8)


@pytest.mark.parametrize("seed", range(20))
def test_every_index_occurs_once_and_no_group_overflows(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.randint(1, 600)
    lengths = [rng.randint(1, capacity) for _ in range(rng.randint(1, 400))]

    groups = pack(lengths, capacity)

    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in group) <= capacity for group in groups)
    assert groups == sorted(sorted(group) for group in groups)
    assert groups == pack(lengths, capacity)
    # Two groups that fit into one would break the bound of best fit decreasing.
    fewest = -(-sum(lengths) // capacity)
    loads = sorted(sum(lengths[index] for index in group) for group in groups)
    assert len(groups) == 1 or loads[0] + loads[1] > capacity
    assert len(groups) <= 2 * fewest


def test_a_hundred_thousand_dialogues_pack_tightly() -> None:
    rng = random.Random(0)
    lengths = [min(2048, int(rng.lognormvariate(5, 1)) + 1) for _ in range(100_000)]

    groups = pack(lengths, 2048)

    assert sum(lengths) / (2048 * len(groups)) > 0.99
