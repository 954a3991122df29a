"""Which curves the report shows of a step's metrics, and how to read them."""

from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from pipeline.report.charts import Curve, line_chart
from pipeline.report.figures import task_curves
from pipeline.report.results import StepResult


@dataclass(frozen=True)
class Chart:
    """A chart of one step: which metrics, and how to read them."""

    title: str
    note: str
    names: Mapping[str, str]
    """Metrics and what their curves are called."""

    key: bool = False
    """Shown first; of several, the first that the step has."""

    logarithmic: bool = False
    """Positive values that may span orders of magnitude."""

    exact: bool = False
    """Set rather than measured: not smoothed."""


@dataclass(frozen=True)
class DrawnChart:
    """A chart with its picture."""

    chart: Chart
    names: list[str]
    """Of its curves."""

    last: str
    """The last value of the last curve."""

    picture: Markup


SCORE = Chart("Score", "reward model, sampled answers", {"score": "score"}, key=True)
REWARD = Chart("Reward", "all sources, sampled answers", {"score": "reward"}, key=True)
"""In place of the score, where sources give the rewards."""

CHARTS = (
    SCORE,
    Chart(
        "Accuracy",
        "pairs in the right order, or rows in their class",
        {"accuracy": "training", "eval_accuracy": "held out"},
        key=True,
    ),
    Chart(
        "Loss",
        "nats per token, or per pair",
        {"loss": "training", "eval_loss": "held out"},
        key=True,
    ),
    Chart("Perplexity", "held-out answers", {"eval_perplexity": "held out"}, logarithmic=True),
    Chart(
        "Mean score",
        "held out; the gap is what RL climbs",
        {"eval_mean_chosen": "chosen", "eval_mean_rejected": "rejected"},
    ),
    Chart(
        "Gold reward",
        "measured, not trained on",
        {"gold": "training", "eval_gold": "held out"},
    ),
    Chart("Reward failures", "responses without a reward", {"reward_failures": "share"}),
    Chart("KL to the reference", "nats per answer; its price", {"kl": "kl"}),
    Chart("Response length", "tokens", {"response_length": "length"}),
    Chart("Entropy", "nats per token; near 0 is collapse", {"entropy": "entropy"}),
    Chart("Stop rate", "answers that end by themselves", {"stop_rate": "rate"}),
    Chart("Clip fraction", "tokens outside the trust region", {"clip_fraction": "fraction"}),
    Chart(
        "Explained variance",
        "of returns, by the critic; 1 is all",
        {"explained_variance": "share"},
    ),
    Chart(
        "Groups of equal rewards",
        "share of the prompts; they teach nothing",
        {"dead_right": "all right", "dead_wrong": "all wrong"},
    ),
    Chart("Spread within groups", "standard deviation of rewards", {"group_std": "deviation"}),
    Chart("Refills", "prompts that gave way to further ones", {"refills": "prompts"}),
    Chart("KL in the loss", "per token, before its weight", {"kl_loss": "kl"}),
    Chart(
        "Correction",
        "of tokens that another policy drew",
        {"correction": "mean weight", "correction_effective": "effective share"},
    ),
    Chart("Repetition", "tokens that end a repeated trigram", {"repetition": "share"}),
    Chart("Value loss", "", {"value_loss": "loss"}),
    Chart("Policy loss", "", {"policy_loss": "loss"}),
    Chart(
        "Gradient norm",
        "before clipping",
        {"grad_norm": "norm", "actor_grad_norm": "actor", "critic_grad_norm": "critic"},
    ),
    Chart("Largest ratio", "new to old policy, one token", {"ratio_max": "ratio"}),
    Chart("Rollout gap", "generation against training, nats", {"rollout_gap": "gap"}),
    Chart(
        "Utilization",
        "share of the peak; hardware counts what is computed twice",
        {"mfu": "model", "hfu": "hardware"},
    ),
    Chart("Learning rate", "", {"lr": "lr"}, exact=True),
    Chart("KL coefficient", "", {"kl_coef": "coefficient"}, exact=True),
)
"""In the order in which they are shown; a step has those of which it logged a metric."""

PREFERENCE_CHARTS = (
    Chart(
        "Margin",
        "implicit rewards, chosen less rejected",
        {"margin": "training", "eval_margin": "held out"},
    ),
    Chart(
        "Implicit rewards",
        "held out; both may fall, see preference.nll_coef",
        {"eval_reward_chosen": "chosen", "eval_reward_rejected": "rejected"},
    ),
    Chart(
        "Log-probability",
        "nats per token, held out",
        {"eval_logp_chosen": "chosen", "eval_logp_rejected": "rejected"},
    ),
    Chart("KL to its start", "nats per answer to held-out prompts", {"eval_kl": "kl"}),
    Chart(
        "Ends of answers",
        "share of sampled answers that end by themselves",
        {"eval_sampled_stop_rate": "rate"},
    ),
)
"""Of steps that learn from preferences."""

PHASES = ("generation", "experience", "training")


SOURCE = "reward_"
"""How the metric of a source of rewards begins."""

NO_SOURCES = ("reward_score", "reward_failures", "reward_chosen", "reward_rejected")


def charts_of(step: StepResult) -> list[Chart]:
    """The charts that may be shown of a step, one of its sources of rewards among them."""
    found = {name for line in step.metrics for name in line if name.startswith(SOURCE)}
    sources = sorted(found - set(NO_SOURCES))
    tasks = [
        Chart(f"Task {task}", "share of right answers, greedy", names)
        for task, names in task_curves(step).items()
    ]
    if not sources:
        of_preferences = PREFERENCE_CHARTS if step.series("margin") else ()
        return [*CHARTS, *of_preferences, *tasks]
    by_source = Chart(
        "Reward by source",
        "mean of sampled answers, unweighted",
        {name: name.removeprefix(SOURCE) for name in sources},
    )
    others = [chart for chart in CHARTS if chart is not SCORE]
    return [REWARD, *([by_source] if len(sources) > 1 else []), *others, *tasks]


def step_charts(step: StepResult) -> list[DrawnChart]:
    """Every chart of the step that has a curve of two points or more."""
    drawn: list[DrawnChart] = []
    for chart in charts_of(step):
        curves = [
            Curve(title, points, measured=name.startswith("eval_"), exact=chart.exact)
            for name, title in chart.names.items()
            if (points := step.series(name))
        ]
        if not any(len(curve.points) > 1 for curve in curves):
            continue
        names = [curve.name for curve in curves]
        last = f"{curves[-1].points[-1][1]:.4g}"
        picture = line_chart(
            curves,
            label=f"{chart.title} over the steps of {step.name}",
            logarithmic=chart.logarithmic,
        )
        drawn.append(DrawnChart(chart, names, last, picture))
    return drawn


def split_key_charts(
    charts: Mapping[str, list[DrawnChart]],
) -> tuple[dict[str, DrawnChart], dict[str, list[DrawnChart]]]:
    """(the chart of each step that is shown first, the others)."""
    first: dict[str, DrawnChart] = {}
    for name, of_step in charts.items():
        key = next((drawn for drawn in of_step if drawn.chart.key), None)
        if key is not None:
            first[name] = key
    rest = {
        name: [drawn for drawn in of_step if drawn is not first.get(name)]
        for name, of_step in charts.items()
    }
    return first, rest


def phase_shares(step: StepResult) -> dict[str, float]:
    """Share of the time of each phase of an iteration; empty for steps without phases."""
    seconds = {
        phase: sum(value for _, value in step.series(f"seconds_{phase}")) for phase in PHASES
    }
    total = sum(seconds.values())
    return {phase: value / total for phase, value in seconds.items()} if total else {}
