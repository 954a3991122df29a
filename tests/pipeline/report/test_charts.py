"""Curves as SVG."""

from pipeline.report.charts import decimate, step_charts
from pipeline.report.results import StepResult


def test_decimation_keeps_a_single_spike() -> None:
    kept = decimate([(float(x), 9.0 * (x == 123)) for x in range(9000)], max_bins=100)
    assert (len(kept) <= 200, (123.0, 9.0) in kept) == (True, True)


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
