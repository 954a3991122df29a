"""Evaluation figures of steps and models, and how the report words them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.report.intervals import share_interval
from pipeline.report.results import Results, StepResult, finite, mapping, of_one_origin

BASE = "base"
"""The model before the first step."""

TITLES = {
    BASE: "Base",
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


def title(name: str, results: Results) -> str:
    """What a step or model is called: by its method, else its directory; `step3_ppo` is PPO."""
    step = results.steps.get(name)
    short = step.method if step else name.split("_", 1)[-1]
    return TITLES.get(short, short.replace("_", " ").upper())


def points(change: float) -> str:
    """A change of a share, in percentage points with its sign."""
    return f"{100 * change:+z.1f}".replace("-", "\u2212")


def percent(share: float) -> str:
    """0.844 as `84.4 %`."""
    return f"{100 * share:.1f}".removesuffix(".0") + "\u202f%"


def score(value: float) -> str:
    """A reward-model score, with its sign."""
    return f"{value:+z.2f}".replace("-", "\u2212")


def plain(value: float) -> str:
    """A figure with two decimals, or none where it is large."""
    return f"{value:z,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def nats(value: float) -> str:
    """A figure in nats."""
    return f"{value:z.2f} nats"


def tokens(value: float) -> str:
    """A mean number of tokens."""
    return f"{value:.1f} tokens"


def listed(names: Sequence[str]) -> str:
    """`A`, `A and B`, `A, B and C`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


SHOWN = 2
"""Curves of a task in the report: its first metrics."""


@dataclass(frozen=True)
class TaskFigure:
    """One share of right answers of a step's model."""

    name: str
    """`gsm8k_strict`: the task and the metric."""

    before: float
    after: float
    questions: int

    @property
    def title(self) -> str:
        """`gsm8k, strict`."""
        task, _, metric = self.name.partition("_")
        return f"{task}, {metric.replace('_', ' ')}"

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `after` (Wilson 1927)."""
        return share_interval(self.after * self.questions, self.questions)


def task_figures(step: StepResult) -> list[TaskFigure]:
    """The figures of a step's tasks, in their order; empty where it has none."""
    tasks = step.eval.get("tasks")
    found: list[TaskFigure] = []
    for name, figure in tasks.items() if isinstance(tasks, Mapping) else ():
        numbers = [finite(figure.get(each)) for each in ("before", "after", "questions")]
        before, after, questions = numbers
        if before is not None and after is not None and questions:
            found.append(TaskFigure(str(name), before, after, int(questions)))
    return found


def task_curves(step: StepResult) -> dict[str, dict[str, str]]:
    """The metrics whose curves the report draws, with what the curves are called, by task."""
    curves: dict[str, dict[str, str]] = {}
    for figure in task_figures(step):
        task, _, metric = figure.name.partition("_")
        of_task = curves.setdefault(task, {})
        if len(of_task) < SHOWN:
            of_task[f"eval_{figure.name}"] = metric.replace("_", " ")
    return curves


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
