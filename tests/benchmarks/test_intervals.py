"""How much of one set of time spans another covers."""

from benchmarks.engine_gpu import covered, merged, total


def test_spans_that_overlap_or_touch_count_once() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert total([(5, 6), (0, 2), (1, 3), (3, 4)]) == 5


def test_covered_is_the_time_in_both() -> None:
    copies = [(0.0, 4.0), (6.0, 8.0)]

    assert covered(copies, [(1, 2), (1.5, 3), (7, 9)]) == 3
    assert covered(copies, [(4, 6)]) == 0
    assert covered(copies, [(0, 10)]) == 6
