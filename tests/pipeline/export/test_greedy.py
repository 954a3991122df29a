"""Greedy responses of two runtimes, whose logits differ by rounding."""

import pytest

from pipeline.export.greedy import equal_before_a_tie


@pytest.mark.parametrize(
    ("found", "equal"),
    [
        ([5, 6, 7], 3),
        ([5, 9, 9], 1),  # the second token's logit is as good as another's: what follows may differ
        ([5, 6, 9], None),  # the third one's is not
        ([9, 6, 7], None),
    ],
)
def test_tokens_agree_until_rounding_decides(found: list[int], equal: int | None) -> None:
    assert equal_before_a_tie([5, 6, 7], [0.5, 1e-4, 0.5], found, tie=1e-3) == equal
