"""The blocks of stages, against all divisions."""

from itertools import combinations, pairwise

import pytest

from pipeline.parallel.schedules import balance_stages


def by_trying_all(costs: list[float], stages: int, last: float) -> list[int]:
    """The division whose slowest stages are fastest, of equal ones the first."""
    found: list[tuple[list[float], list[int]]] = []
    for ends in combinations(range(1, len(costs)), stages - 1):
        sums = [sum(costs[a:b]) for a, b in pairwise([0, *ends, len(costs)])]
        sums[-1] += last
        counts = [b - a for a, b in pairwise([0, *ends, len(costs)])]
        found.append((sorted(sums, reverse=True), counts))
    return min(found)[1]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("last", [0, 3])
@pytest.mark.parametrize("costs", [[1] * 7, [1, 2, 3, 4, 5, 6, 7], [9, 1, 1, 1, 1, 4, 2, 2]])
def test_the_slowest_stage_is_as_fast_as_can_be(
    costs: list[float], last: float, stages: int
) -> None:
    assert balance_stages(costs, stages, last=last) == by_trying_all(costs, stages, last)
