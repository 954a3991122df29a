"""Sums of sources, by hand."""

from rewards.contract import Scored
from rewards.mixture import weighted_sum, without_failures


def test_the_sum_is_weighted_and_the_weights_of_what_does_not_apply_go_to_the_others() -> None:
    values = [[1.0, None, 1.0, None], [0.5, 0.5, None, None]]

    # Row 2: 0.5 alone, with the weight 2 + 1 of both. Row 3: 1 alone, likewise.
    assert weighted_sum(values, [2.0, 1.0]) == [2.5, 1.5, 3.0, None]


def test_a_failed_response_has_no_reward_and_a_source_without_weight_hides_none() -> None:
    correct = Scored([None, None, 3.0], [None, "it raised", None])
    length = Scored([4.0, 3.0, 1.0], [None, None, None])
    unweighted = Scored([None, None, None], ["it raised", "it raised", "it raised"])
    weights = [1.0, 0.5, 0.0]

    values = without_failures([correct, length, unweighted], weights)

    assert values == [[None, None, 3.0], [4.0, None, 1.0], [None, None, None]]
    # If only length applies, it has the weight of both: 1.5 instead of 0.5.
    assert weighted_sum(values, weights) == [1.5 * 4, None, 3 + 0.5]
    assert without_failures([unweighted], [0.0]) == [[None, None, None]]
