"""Curves as SVG."""

from pipeline.report.charts import step_charts
from pipeline.report.results import StepResult


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
