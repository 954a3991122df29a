"""The order of rows: a permutation of each file, mixed by weight, gone on with from its numbers."""

import pytest

from pipeline.data.corpus.permutation import Permutation
from pipeline.data.corpus.stream import MixedStream


def test_each_number_has_one_place_whatever_their_count() -> None:
    for size in (*range(1, 140), 1000, 1024, 1025, 10_000):
        order = Permutation(size, "a")
        assert sorted(order[place] for place in range(size)) == list(range(size)), size

    large = Permutation(10**11, "a")
    found = {large[place] for place in range(5000)}
    assert len(found) == 5000
    assert max(found) < 10**11
    assert sum(number < 10**11 // 2 for number in found) == pytest.approx(2500, abs=200)
    with pytest.raises(IndexError):
        large[10**11]


def test_another_key_is_another_order_and_no_place_stays_near_its_number() -> None:
    first, again, other = (Permutation(1000, key) for key in ("a", "a", "b"))
    numbers = [first[place] for place in range(1000)]

    assert numbers == [again[place] for place in range(1000)]
    assert sum(numbers[place] == other[place] for place in range(1000)) < 10
    assert sum(abs(number - place) < 10 for place, number in enumerate(numbers)) < 60


def rows(stream: MixedStream, count: int) -> list[tuple[int, int]]:
    return [each for _ in range(count // stream.batch_size) for each in next(stream)]


def test_every_stretch_has_the_mixture_and_a_pass_ends_with_the_shortest_file() -> None:
    stream = MixedStream([60, 1000], [3.0, 1.0], batch_size=4, seed=1)

    taken = rows(stream, 80)

    assert stream.num_rows == 80  # 60 of the first, a third of as many of the other
    assert all([file for file, _ in taken[at : at + 4]].count(0) == 3 for at in range(0, 80, 4))
    assert sorted(row for file, row in taken if file == 0) == list(range(60))
    later = rows(stream, 80)
    assert sorted(row for file, row in later if file == 0) == list(range(60))
    of_other = [row for file, row in taken + later if file == 1]
    assert len(set(of_other)) == 40  # the longer file goes on with rows that it has not given
    assert [row for file, row in taken if file == 0] != [row for file, row in later if file == 0]


def test_without_weights_a_pass_has_every_row_of_every_file_once() -> None:
    stream = MixedStream([7, 20, 3], [7.0, 20.0, 3.0], batch_size=5, seed=0)

    taken = rows(stream, 30)

    assert stream.num_rows == 30
    assert sorted(taken) == [(file, row) for file, n in enumerate((7, 20, 3)) for row in range(n)]
    assert (stream.num_steps(1.5, None), stream.num_steps(1.5, 4)) == (9, 4)


def test_a_stream_goes_on_where_another_stood() -> None:
    whole, cut = (MixedStream([9, 31], [1.0, 2.5], batch_size=4, seed=3) for _ in range(2))
    expected = rows(whole, 80)

    begun = rows(cut, 28)
    after = MixedStream([9, 31], [1.0, 2.5], batch_size=4, seed=3)
    after.load_state_dict(cut.state_dict())

    assert begun + rows(after, 52) == expected
