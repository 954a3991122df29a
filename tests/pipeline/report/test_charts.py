"""Curves as SVG."""

import pytest

from pipeline.report.charts import decimate, smooth, step_charts, tick_labels
from pipeline.report.results import StepResult


def test_smoothing_averages_adjacent_points_and_narrows_at_the_ends() -> None:
    points = [(float(step), float(step % 2)) for step in range(60)]  # averaged over 2 on each side

    means = smooth(points)

    assert means[0] == (0.0, 0.0)
    assert means[1] == (1.0, pytest.approx(1 / 3))
    assert means[30] == (30.0, pytest.approx(2 / 5))
    assert means[-1] == (59.0, 1.0)


def test_decimation_keeps_a_single_spike() -> None:
    points = [(float(step), 1.0) for step in range(50_000)]
    points[12_345] = (12_345.0, 99.0)

    kept = decimate(points, max_bins=100)

    assert len(kept) <= 200
    assert (12_345.0, 99.0) in kept
    assert kept == sorted(kept)


def test_tick_labels_have_the_digits_that_distinguish_them() -> None:
    assert tick_labels([2.7812, 2.7814, 30]) == ["2.7812", "2.7814", "30"]
    assert tick_labels([9.5e-6, 1.05e-5, 12_500]) == ["9.5e-6", "1.05e-5", "12.5k"]


def test_charts_pair_metrics_with_evaluations_important_ones_first() -> None:
    columns = ["step", "seconds", "eval_loss", "reward_right", "loss", "kl", "eval_gsm8k_strict"]
    metrics = tuple(dict.fromkeys(columns, step) for step in (1, 2))
    step = StepResult(name="step3_ppo", finished=False, metrics=metrics)

    charts = [(chart.title, chart.names) for chart in step_charts(step)]

    assert charts == [
        ("Loss", ["training", "held out"]),
        ("KL to the reference", ["training"]),
        ("Gsm8k strict", ["held out"]),
        ("Reward right", ["training"]),
    ]
