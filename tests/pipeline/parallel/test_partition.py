"""Partitions of blocks into stages, compared with an exhaustive search."""

from itertools import combinations, pairwise

import pytest

from pipeline.parallel.schedules import balance_stages


def search_all(costs: list[float], stages: int, last: float) -> list[int]:
    """Return the first partition with the smallest costs of the slowest stages."""
    candidates: list[tuple[list[float], list[int]]] = []
    for ends in combinations(range(1, len(costs)), stages - 1):
        sums = [sum(costs[a:b]) for a, b in pairwise([0, *ends, len(costs)])]
        sums[-1] += last
        counts = [b - a for a, b in pairwise([0, *ends, len(costs)])]
        candidates.append((sorted(sums, reverse=True), counts))
    return min(candidates)[1]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("last", [0, 3])
@pytest.mark.parametrize("costs", [[1] * 7, [1, 2, 3, 4, 5, 6, 7], [9, 1, 1, 1, 1, 4, 2, 2]])
def test_partition_minimizes_the_cost_of_the_slowest_stage(
    costs: list[float], last: float, stages: int
) -> None:
    assert balance_stages(costs, stages, last=last) == search_all(costs, stages, last)
