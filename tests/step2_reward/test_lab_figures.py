"""The laboratory's figures, by hand and on simulators of known bias."""

import math
from types import SimpleNamespace

import pytest
import torch

from step2_reward.lab.figures import (
    area_under_curve,
    calibrate,
    class_report,
    concordance,
    expected_error,
    length_bias,
    make_bins,
    spearman,
)


def simulated_pairs(count: int, *, sharpness: float = 1.0) -> torch.Tensor:
    """Logits of pairs whose first response wins by sigmoid(difference), given `sharpness` times."""
    generator = torch.Generator().manual_seed(0)
    difference = torch.randn(count, generator=generator) * 2
    wins = torch.rand(count, generator=generator) < torch.sigmoid(difference)
    chosen = torch.where(wins, difference, -difference)
    return torch.stack([sharpness * chosen, torch.zeros(count)], dim=1)


def firsts(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(logits), dtype=torch.int64)


def test_the_error_of_a_calibrated_simulator_goes_to_0() -> None:
    errors = []
    for count in (1_000, 100_000):
        logits = simulated_pairs(count)
        errors.append(expected_error(make_bins(logits, firsts(logits))))

    assert errors[1] < 0.006 < errors[0] < 0.06


def test_a_model_that_is_too_sure_is_found_and_scaled_back() -> None:
    logits = simulated_pairs(50_000, sharpness=3.0)

    found = calibrate(logits, firsts(logits))

    assert found["temperature"] == pytest.approx(3.0, rel=0.03)
    assert found["ece"] < 0.01
    assert found["ece_raw"] > 0.08
    assert sum(each["rows"] for each in found["bins"]) == 50_000
    assert len({each["rows"] for each in found["bins"]}) <= 2


def test_confusion_precision_recall_and_f1_by_hand() -> None:
    true = torch.tensor([0, 0, 0, 1, 1, 2])
    taken = torch.tensor([0, 0, 1, 1, 0, 0])
    logprobs = torch.nn.functional.one_hot(taken, 4).float()

    report = class_report(logprobs, true, ["a", "b", "c", "none"])

    assert report["confusion"] == [[2, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    first, second, third, fourth = (SimpleNamespace(**each) for each in report["classes"])
    assert (first.precision, first.recall) == (0.5, pytest.approx(2 / 3))
    assert first.f1 == pytest.approx(4 / 7)
    assert (second.precision, second.recall, second.f1) == (0.5, 0.5, 0.5)
    assert (third.precision, third.recall, third.f1) == (0.0, 0.0, 0.0)
    assert fourth.auc is None
    assert report["macro_recall"] == pytest.approx((2 / 3 + 1 / 2) / 3)


def test_the_area_under_the_curve_counts_ties_half() -> None:
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8]).double()
    positive = torch.tensor([False, True, False, True])

    assert area_under_curve(scores, positive) == (1 + 0.5 + 1 + 1) / 4
    assert area_under_curve(scores, torch.tensor([True] * 4)) is None
    assert concordance(scores, positive.double()) == (1 + 0.5 + 1 + 1) / 4


def test_rank_correlation_by_hand() -> None:
    one = torch.tensor([1.0, 2.0, 3.0, 4.0])

    assert spearman(one, torch.tensor([10.0, 20.0, 40.0, 30.0])) == pytest.approx(0.8)
    assert spearman(one, torch.ones(4)) == 0.0


def test_the_bias_for_length_by_hand() -> None:
    found = length_bias(
        [
            ([3.0, 1.0, 2.0], [9, 5, 5], [1.0, 0.0, 0.0]),  # the better one is longer, twice
            ([1.0, 1.0], [4, 8], [1.0, 0.0]),  # and here shorter, with a tie of scores
            ([0.0, 1.0], [7, 7], [0.0, 1.0]),  # and here as long
        ]
    )

    assert (found["better_longer"]["value"], found["better_longer"]["count"]) == (1.0, 2)
    assert (found["better_shorter"]["value"], found["better_shorter"]["count"]) == (0.5, 1)
    assert (found["always_longer"], found["always_shorter"]) == (2.5 / 4, 1.5 / 4)
    assert found["of_data"] == pytest.approx((1.0 - 1.0) / 2)
    assert found["spearman"] == pytest.approx((math.sqrt(3) / 2 + 0.0) / 2)
