"""Which blocks of a model each stage of a pipeline has."""

from collections.abc import Sequence
from itertools import accumulate


def balanced(costs: Sequence[float], stages: int, *, last: float = 0.0) -> list[int]:
    """Numbers of blocks of each stage, in order, at least one, so that the slowest is fastest.

    Args:
        costs: of each block, in any unit of time.
        stages: no more than there are blocks.
        last: what the last stage has to do besides, such as logits.

    Returns:
        Of the divisions with the least largest stage the one whose first stages have the most.
    """
    total = [0.0, *accumulate(costs)]
    count = len(costs)
    # worst[s][n]: of s stages behind block n, the largest with the best division.
    worst: list[dict[int, float]] = [{}, {n: total[count] - total[n] + last for n in range(count)}]
    for left in range(2, stages + 1):
        worst.append(
            {
                n: min(
                    max(total[stop] - total[n], worst[left - 1][stop])
                    for stop in range(n + 1, count - left + 2)
                )
                for n in range(count - left + 1)
            }
        )
    counts: list[int] = []
    start, limit = 0, worst[stages][0]
    for left in range(stages, 1, -1):
        stop = max(
            each
            for each in range(start + 1, count - left + 2)
            if total[each] - total[start] <= limit and worst[left - 1][each] <= limit
        )
        counts.append(stop - start)
        start = stop
    return [*counts, count - start]
