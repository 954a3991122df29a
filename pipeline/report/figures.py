"""Evaluation metrics of steps and models: wording and 95% intervals."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Literal

from pipeline.report.results import Results, StepResult, finite, mapping

Verdict = Literal["better", "worse", "not distinguishable"]

Interval = tuple[float, float]

Z = 1.959964
"""95% of a standard normal distribution is between -Z and Z."""

BASE = "base"
"""The model before the first step."""

START = "start"
"""The model that step 3 started from, if no step of the run produced it."""

TITLES = {
    BASE: "Base",
    START: "Starting model",
    "pretrain": "Continued pre-training",
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "dr_grpo": "Dr. GRPO",
    "reinforce_pp": "REINFORCE++",
    "cdpo": "Conservative DPO",
    "rdpo": "Robust DPO",
    "ldpo": "Length-normalized DPO",
    "hinge": "Hinge loss",
    "simpo": "SimPO",
}
"""Titles by method or step name, where the title is not just the name in upper case."""


def title(name: str, results: Results) -> str:
    """Return the title of a step or model: `PPO` for `step3_ppo`."""
    step = results.steps.get(name)
    return method_title(step.method if step else name.split("_", 1)[-1])


def method_title(name: str) -> str:
    """Return the title of a method: `PPO` for `ppo`."""
    return TITLES.get(name, name.replace("_", " ").upper())


def points(change: float) -> str:
    """Format the change of a fraction as signed percentage points."""
    return f"{100 * change:+z.1f}".replace("-", "\u2212")


def percent(share: float) -> str:
    """Format a fraction as a percentage: 0.844 as `84.4%`."""
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def score(value: float) -> str:
    """Format a score with its sign."""
    return f"{value:+z.2f}".replace("-", "\u2212")


def decimal(value: float) -> str:
    """Format a metric with two decimals, or none if it is large."""
    return f"{value:z,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def nats(value: float) -> str:
    """Format a metric in nats."""
    return f"{value:z.2f} nats"


def join_names(names: Sequence[str]) -> str:
    """Join names as `A`, `A and B` or `A, B and C`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def share_interval(successes: float, count: float) -> Interval:
    """Return the 95% interval of a fraction, from `successes` in `count` trials (Wilson 1927)."""
    share = successes / count
    center = share + Z * Z / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the 95% interval of the mean of two or more independent values, assumed normal."""
    center, half = fmean(values), Z * stdev(values) / math.sqrt(len(values))
    return center - half, center + half


def change_interval(gained: float, lost: float, count: int) -> Interval:
    """Return the 95% interval of the change of a fraction from one model to another.

    Of `count` prompts, only the new model is right on `gained` and only the old one on `lost`. Both
    numbers may be fractional; the interval is then conservative. Half a prompt is added to each of
    the four kinds of pairs (Agresti and Min 2005, "Wald + 2").
    """
    total = count + 2
    change = (gained - lost) / total
    spread = math.sqrt((gained + lost + 1) - (gained - lost) ** 2 / total) / total
    return max(-1.0, change - Z * spread), min(1.0, change + Z * spread)


def get_verdict(interval: Interval, *, equal: float = 0.0) -> Verdict:
    """Return the verdict on a metric's interval, where `equal` means no change."""
    low, high = interval
    if low > equal:
        return "better"
    return "worse" if high < equal else "not distinguishable"


def pass_rates(results: Results) -> dict[str, float]:
    """Return the pass rate (correct and polite) of each model, in order, or {} if not judged."""
    rates = {
        model: finite(rate)
        for step in results.steps.values()
        for model, rate in mapping(step.eval.get("judge")).items()
    }
    return {model: rate for model, rate in rates.items() if rate is not None}


FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "perplexity": ("perplexity", decimal),
    "accuracy": ("accuracy", percent),
    "margin": ("margin", score),
    "macro_recall": ("mean recall of classes", percent),
    "best_found": ("best response found", percent),
    "mean_error": ("mean error", score),
    "calibration_error": ("calibration error", percent),
    "mean_rejected": ("mean score, rejected", score),
    "mean_chosen": ("mean score, chosen", score),
    "score": ("score", score),
    "reward": ("reward", score),
    "gold": ("gold reward", score),
    "length": ("response length, tokens", decimal),
    "win_rate": ("win rate", percent),
    "kl": ("KL per response", nats),
    "stop_rate": ("stop rate", percent),
}
"""(title, format) of the metrics in a step's `eval`, with or without `_before` and `_after`."""


def before_after(step: StepResult) -> list[tuple[str, str, str]]:
    """Return (name, before, after) for each evaluation metric of a step; before may be empty."""
    keys = [key.removesuffix("_after") for key in step.eval if key.endswith("_after")]
    sources = [key for key in keys if key.startswith("reward_") and key not in FIGURES]
    titles = {key: (f"reward, {key.removeprefix('reward_')}", score) for key in sources}
    rows: list[tuple[str, str, str]] = []
    for key, (name, show) in (FIGURES | (titles if len(sources) > 1 else {})).items():
        before = step.metric(f"{key}_before")
        after = step.metric(f"{key}_after" if key in keys else key)
        if after is not None:
            rows.append((name, "" if before is None else show(before), show(after)))
    for key, figure in mapping(step.eval.get("tasks")).items():
        values = (finite(mapping(figure).get(name)) for name in ("before", "after", "questions"))
        before, after, questions = values
        if before is not None and after is not None and questions:
            low, high = map(percent, share_interval(after * questions, questions))
            task, _, metric = key.partition("_")
            name = f"{task}, {metric.replace('_', ' ')}"
            rows.append((name, percent(before), f"{percent(after)} ({low} to {high})"))
    return rows
