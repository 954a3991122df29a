"""Lengths of time spans: how much of one set another covers."""

Intervals = list[tuple[float, float]]
"""Start and end of each; they may overlap each other."""


def merged(intervals: Intervals) -> Intervals:
    """The same moments as spans that are disjoint and in order."""
    spans: Intervals = []
    for start, end in sorted(intervals):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((start, end))
    return spans


def total(intervals: Intervals) -> float:
    """Length of the moments that lie in any of the spans."""
    return sum(end - start for start, end in merged(intervals))


def covered(intervals: Intervals, by: Intervals) -> float:
    """Length of the moments that lie in both."""
    return total(intervals) + total(by) - total([*intervals, *by])
