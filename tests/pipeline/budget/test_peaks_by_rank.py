"""Each process takes what the plan says, however processes share a model.

`python -m benchmarks.plan_by_rank` has the same of a larger model.
"""

import pytest

from benchmarks.plan_by_rank import peaks_of
from benchmarks.plan_by_rank_worker import CASES, Shape

QUICK = ("pp 2, gpipe", "tp 2")
"""Of a stage that keeps all micro-batches, with logits on the last one, and of divided logits."""


@pytest.mark.jobs
@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.grid) for each in CASES],
)
def test_the_peak_of_each_rank_is_within_5_percent_of_the_plan(name: str) -> None:
    peaks = peaks_of(name, Shape(hidden=256, length=128, count=6))

    assert [peak.planned / peak.measured for peak in peaks] == pytest.approx(
        [1.0] * CASES[name].processes, abs=0.05
    )
