"""Which blocks of a model each stage of a pipeline has."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import inf


def balanced(costs: Sequence[float], stages: int, *, last: float = 0) -> list[int]:
    """Numbers of blocks of each stage, in order, at least one, so that the slowest is fastest.

    Of the divisions that are as fast it is the one with the least sum of squares, and of these the
    one whose first stages have the fewest blocks, since they keep the activations of the most
    micro-batches.

    Args:
        costs: of each block, in any unit of time; sums of whole numbers are exact.
        stages: no more than there are blocks.
        last: further work of the last stage, such as logits.
    """
    total, count = [0, *accumulate(costs)], len(costs)

    def cost(start: int, stop: int) -> float:
        return total[stop] - total[start] + (last if stop == count else 0)

    @cache
    def slowest(start: int, left: int) -> float:
        """The least cost of the slowest of `left` stages with the blocks from `start` on."""
        if left == 1:
            return cost(start, count)
        stops = range(start + 1, count - left + 2)
        return min(max(cost(start, stop), slowest(stop, left - 1)) for stop in stops)

    limit = slowest(0, stages)

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Sum of squares and numbers of blocks of `left` stages, none slower than the limit."""
        stops = [count] if left == 1 else range(start + 1, count - left + 2)
        found: list[tuple[float, tuple[int, ...]]] = [(inf, ())]
        for stop in stops:
            own = cost(start, stop)
            squares, counts = (0.0, ()) if left == 1 else best(stop, left - 1)
            if own <= limit:
                found.append((own * own + squares, (stop - start, *counts)))
        return min(found)

    return list(best(0, stages)[1])
