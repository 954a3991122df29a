"""Sums of sources, by hand."""

from rewards.contract import SourceResults
from rewards.mixture import mask_failures, weighted_sum


def test_weights_are_rescaled_over_the_sources_that_apply() -> None:
    values = [[1.0, None, 1.0, None], [0.5, 0.5, None, None]]

    # Row 2: 0.5 alone, with the weight 2 + 1 of both. Row 3: 1 alone, likewise.
    assert weighted_sum(values, [2.0, 1.0]) == [2.5, 1.5, 3.0, None]


def test_failure_of_a_weighted_source_masks_the_reward_of_its_response() -> None:
    correct = SourceResults([None, None, 3.0], [None, "it raised", None])
    length = SourceResults([4.0, 3.0, 1.0], [None, None, None])
    unweighted = SourceResults([None, None, None], ["it raised", "it raised", "it raised"])
    weights = [1.0, 0.5, 0.0]

    values = mask_failures([correct, length, unweighted], weights)

    assert values == [[None, None, 3.0], [4.0, None, 1.0], [None, None, None]]
    # If only length applies, it has the weight of both: 1.5 instead of 0.5.
    assert weighted_sum(values, weights) == [1.5 * 4, None, 3 + 0.5]
    assert mask_failures([unweighted], [0.0]) == [[None, None, None]]
