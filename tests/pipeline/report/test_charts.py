"""Curves as SVG."""

import pytest

from pipeline.report.charts import smoothed, step_charts, thinned, tick_labels
from pipeline.report.results import StepResult


def test_smoothing_is_the_mean_of_neighbours_and_narrows_at_the_ends() -> None:
    points = [(float(step), float(step % 2)) for step in range(60)]  # 2 neighbours on each side

    means = smoothed(points)

    assert means[0] == (0.0, 0.0)
    assert means[1] == (1.0, pytest.approx(1 / 3))
    assert means[30] == (30.0, pytest.approx(2 / 5))
    assert means[-1] == (59.0, 1.0)


def test_thinning_keeps_the_one_spike_among_many_steps() -> None:
    points = [(float(step), 1.0) for step in range(50_000)]
    points[12_345] = (12_345.0, 99.0)

    kept = thinned(points, max_bins=100)

    assert len(kept) <= 200
    assert (12_345.0, 99.0) in kept
    assert kept == sorted(kept)


def test_labels_have_the_digits_that_distinguish_them() -> None:
    assert tick_labels([2.7812, 2.7814, 30]) == ["2.7812", "2.7814", "30"]
    assert tick_labels([9.5e-6, 1.05e-5, 12_500]) == ["9.5e-6", "1.05e-5", "12.5k"]


def test_a_metric_and_its_evaluation_share_a_chart_and_the_important_ones_come_first() -> None:
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
