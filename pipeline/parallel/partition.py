"""Which blocks of a model each stage of a pipeline has."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from operator import add

Join = Callable[[float, float], float]
"""What stages cost together, from the first of them and all behind it."""


def balanced(costs: Sequence[float], stages: int, *, last: float = 0) -> list[int]:
    """Numbers of blocks of each stage, in order, at least one, so that the slowest is fastest.

    Of the divisions that are as fast it is one whose stages are most alike, by the least sum of
    squares, and of these the one whose first stages have the fewest blocks, since they keep the
    activations of the most micro-batches.

    Args:
        costs: of each block, in any unit of time; sums of whole numbers are exact.
        stages: no more than there are blocks.
        last: what the last stage has to do besides, such as logits.
    """
    total, count = [0, *accumulate(costs)], len(costs)

    def cost(start: int, stop: int) -> float:
        return total[stop] - total[start] + (last if stop == count else 0)

    limit = _cheapest(cost, count, stages, max)[stages][0]

    def squares(start: int, stop: int) -> float:
        own = cost(start, stop)
        return own * own if own <= limit else inf

    cheapest = _cheapest(squares, count, stages, add)
    counts: list[int] = []
    start = 0
    for left in range(stages, 1, -1):
        behind = cheapest[left - 1]
        best = cheapest[left][start]
        stop = next(
            n for n in sorted(behind) if n > start and squares(start, n) + behind[n] == best
        )
        counts.append(stop - start)
        start = stop
    return [*counts, count - start]


def _cheapest(
    cost: Callable[[int, int], float], count: int, stages: int, join: Join
) -> list[dict[int, float]]:
    """The least that stages can cost together, at [s][n] s stages of all blocks from n on.

    Args:
        cost: of a stage with the blocks from one number to before another.
        count: of all blocks.
        stages: the most there are.
        join: grows with both.
    """
    found: list[dict[int, float]] = [{}, {n: cost(n, count) for n in range(count)}]
    for left in range(2, stages + 1):
        behind = found[left - 1]
        found.append(
            {
                n: min(join(cost(n, stop), behind[stop]) for stop in behind if stop > n)
                for n in range(count - left + 1)
            }
        )
    return found
