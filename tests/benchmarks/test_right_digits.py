"""The share of right digits, by hand."""

import pytest

from benchmarks.right_digits import right_digits
from rewards.contract import Episode


@pytest.mark.parametrize(
    ("given", "share"),
    [("579", 1.0), (" 579", 1.0), ("589", 2 / 3), ("975", 1 / 3), ("57", 0), ("0579", 0), ("", 0)],
)
def test_digits_count_each_in_its_place(given: str, share: float) -> None:
    episode = Episode(
        prompt=(), response=given, extra={"answer": "579"}, stopped=True, num_tokens=4, slot=0
    )

    assert right_digits([episode]) == [share]
