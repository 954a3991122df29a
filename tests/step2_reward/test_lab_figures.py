"""The laboratory's figures, against hand-computed values and simulators of known bias."""

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


def simulate_pairs(count: int, *, sharpness: float = 1.0) -> torch.Tensor:
    """Return logits of pairs won with probability sigmoid(difference), times `sharpness`."""
    generator = torch.Generator().manual_seed(0)
    difference = torch.randn(count, generator=generator) * 2
    wins = torch.rand(count, generator=generator) < torch.sigmoid(difference)
    chosen = torch.where(wins, difference, -difference)
    return torch.stack([sharpness * chosen, torch.zeros(count)], dim=1)


def zero_classes(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(logits), dtype=torch.int64)


def test_calibration_error_of_a_calibrated_simulator_converges_to_0() -> None:
    errors = []
    for count in (1_000, 100_000):
        logits = simulate_pairs(count)
        errors.append(expected_error(make_bins(logits, zero_classes(logits))))

    assert errors[1] < 0.006 < errors[0] < 0.06


def test_temperature_scaling_corrects_an_overconfident_model() -> None:
    logits = simulate_pairs(50_000, sharpness=3.0)

    calibration = calibrate(logits, zero_classes(logits))

    assert calibration["temperature"] == pytest.approx(3.0, rel=0.03)
    assert calibration["ece"] < 0.01
    assert calibration["ece_raw"] > 0.08
    assert sum(row["rows"] for row in calibration["bins"]) == 50_000
    assert len({row["rows"] for row in calibration["bins"]}) <= 2


def test_class_report_matches_hand_computed_values() -> None:
    true = torch.tensor([0, 0, 0, 1, 1, 2])
    predicted = torch.tensor([0, 0, 1, 1, 0, 0])
    logprobs = torch.nn.functional.one_hot(predicted, 4).float()

    report = class_report(logprobs, true, ["a", "b", "c", "none"])

    assert report["confusion"] == [[2, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    first, second, third, fourth = (SimpleNamespace(**row) for row in report["classes"])
    assert (first.precision, first.recall) == (0.5, pytest.approx(2 / 3))
    assert first.f1 == pytest.approx(4 / 7)
    assert (second.precision, second.recall, second.f1) == (0.5, 0.5, 0.5)
    assert (third.precision, third.recall, third.f1) == (0.0, 0.0, 0.0)
    assert fourth.auc is None
    assert report["macro_recall"] == pytest.approx((2 / 3 + 1 / 2) / 3)


def test_area_under_curve_counts_ties_half() -> None:
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8]).double()
    positive = torch.tensor([False, True, False, True])

    assert area_under_curve(scores, positive) == (1 + 0.5 + 1 + 1) / 4
    assert area_under_curve(scores, torch.tensor([True] * 4)) is None
    assert concordance(scores, positive.double()) == (1 + 0.5 + 1 + 1) / 4


def test_rank_correlation_matches_hand_computed_values() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])

    assert spearman(values, torch.tensor([10.0, 20.0, 40.0, 30.0])) == pytest.approx(0.8)
    assert spearman(values, torch.ones(4)) == 0.0


def test_length_bias_matches_hand_computed_values() -> None:
    bias = length_bias(
        [
            ([3.0, 1.0, 2.0], [9, 5, 5], [1.0, 0.0, 0.0]),  # better and longer, twice
            ([1.0, 1.0], [4, 8], [1.0, 0.0]),  # better but shorter, tied
            ([0.0, 1.0], [7, 7], [0.0, 1.0]),  # equal lengths
        ]
    )

    assert (bias["better_longer"]["value"], bias["better_longer"]["count"]) == (1.0, 2)
    assert (bias["better_shorter"]["value"], bias["better_shorter"]["count"]) == (0.5, 1)
    assert (bias["always_longer"], bias["always_shorter"]) == (2.5 / 4, 1.5 / 4)
    assert bias["of_data"] == pytest.approx((1.0 - 1.0) / 2)
    assert bias["spearman"] == pytest.approx((math.sqrt(3) / 2 + 0.0) / 2)
