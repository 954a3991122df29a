"""The evaluation figures of steps and models, as the page's tables and bars have them."""

from pipeline.report.choice import of_one_origin
from pipeline.report.results import Results, StepResult, finite, mapping
from pipeline.report.tasks import TaskFigure, task_figures
from pipeline.report.words import nats, percent, plain, score, tokens


def pass_rates(results: Results) -> dict[str, float]:
    """Share of answers that are correct and polite, by model; empty without a judge.

    The earliest model comes first.
    """
    rates: dict[str, float | None] = {}
    alike = {step.name for step in of_one_origin(results.methods, results.steps)}
    apart = {step.name for step in results.methods} - alike
    for step in results.steps.values():
        # Methods of one origin were all measured against the same models before them.
        rates |= {
            model: finite(rate)
            for model, rate in mapping(step.eval.get("judge")).items()
            if model not in rates or step.name not in apart
        }
    return {model: rate for model, rate in rates.items() if rate is not None}


def before_after(step: StepResult) -> list[tuple[str, str, str]]:
    """(name, before, after) of the step's evaluation figures; before may be empty."""
    pairs = {
        "perplexity": ("perplexity_before", "perplexity_after", plain),
        "accuracy": ("accuracy_before", "accuracy_after", percent),
        "margin": ("margin_before", "margin_after", score),
        "mean recall of classes": ("macro_recall_before", "macro_recall_after", percent),
        "decided pairs in order": ("order_accuracy_before", "order_accuracy_after", percent),
        "best response found": ("best_found_before", "best_found_after", percent),
        "mean error": ("mean_error_before", "mean_error_after", score),
        "calibration error": ("", "calibration_error", percent),
        "mean score, rejected": ("", "mean_rejected", score),
        "mean score, chosen": ("", "mean_chosen", score),
        "score": ("score_before", "score_after", score),
        "reward": ("reward_before", "reward_after", score),
        **{name: (f"{key}_before", f"{key}_after", score) for key, name in _sources(step)},
        "answer length": ("length_before", "length_after", tokens),
        "win rate": ("", "win_rate", percent),
        "KL per answer": ("", "kl", nats),
        "stop rate": ("", "stop_rate", percent),
    }
    rows = [
        (name, step.number(before), step.number(after), show)
        for name, (before, after, show) in pairs.items()
    ]
    figures = [
        (name, "" if before is None else show(before), show(after))
        for name, before, after, show in rows
        if after is not None
    ]
    return figures + [_of_task(figure) for figure in task_figures(step)]


def _of_task(figure: TaskFigure) -> tuple[str, str, str]:
    low, high = map(percent, figure.interval)
    return figure.title, percent(figure.before), f"{percent(figure.after)} ({low} to {high})"


def _sources(step: StepResult) -> list[tuple[str, str]]:
    """(figure, name) of each of several sources of rewards, and of gold."""
    keys = [key.removesuffix("_after") for key in step.eval if key.endswith("_after")]
    sources = [
        (key, f"reward, {key.removeprefix('reward_')}") for key in keys if key.startswith("reward_")
    ]
    gold = [("gold", "gold reward")] if "gold" in keys else []
    return (sources if len(sources) > 1 else []) + gold
