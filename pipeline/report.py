"""The report of a run: one HTML file that shows whether the model got better.

`python -m pipeline.report OUT` writes OUT/report.html from whatever the steps left in OUT. The file
needs nothing else: style and curves are inside. Text of models and data is escaped.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.charts import Curve, line_chart
from pipeline.errors import ConfigError
from pipeline.findings import JUDGED, before_after, findings, judge_rates, score
from pipeline.progress import duration
from pipeline.results import Results, StepResult, read_results

TITLES = {
    "base": "Base",
    "step1_sft": "Supervised fine-tuning",
    "step2_reward": "Reward model",
    "step3_ppo": "PPO",
}


@dataclass(frozen=True)
class Chart:
    """A chart of one step: which metrics, and how to read them."""

    title: str
    note: str
    names: Mapping[str, str]
    """Metrics and what their curves are called."""

    key: bool = False
    """The step's curve that is shown first."""

    logarithmic: bool = False
    """Positive values that may span orders of magnitude."""


@dataclass(frozen=True)
class DrawnChart:
    """A chart with its picture."""

    chart: Chart
    names: list[str]
    """Of its curves."""

    last: str
    """The last value of the last curve."""

    picture: Markup


CHARTS: dict[str, tuple[Chart, ...]] = {
    "step1_sft": (
        Chart(
            "Loss",
            "nats per trained token",
            {"loss": "training", "eval_loss": "held out"},
            key=True,
        ),
        Chart("Perplexity", "held-out answers", {"eval_perplexity": "held out"}, logarithmic=True),
        Chart("Gradient norm", "before clipping", {"grad_norm": "norm"}),
        Chart("Learning rate", "", {"lr": "lr"}),
    ),
    "step2_reward": (
        Chart(
            "Loss", "nats per pair; 0.69 is guessing", {"loss": "training", "eval_loss": "held out"}
        ),
        Chart(
            "Accuracy",
            "pairs in the right order",
            {"accuracy": "training", "eval_accuracy": "held out"},
            key=True,
        ),
        Chart(
            "Mean score",
            "the gap is what PPO climbs",
            {"mean_chosen": "chosen", "mean_rejected": "rejected"},
        ),
        Chart("Gradient norm", "before clipping", {"grad_norm": "norm"}),
        Chart("Learning rate", "", {"lr": "lr"}),
    ),
    "step3_ppo": (
        Chart("Score", "reward model, sampled answers", {"score": "score"}, key=True),
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
        Chart("Value loss", "", {"value_loss": "loss"}),
        Chart("Policy loss", "", {"policy_loss": "loss"}),
        Chart("Largest ratio", "new to old policy, one token", {"ratio_max": "ratio"}),
        Chart("Rollout gap", "generation against training, nats", {"rollout_gap": "gap"}),
        Chart("KL coefficient", "", {"kl_coef": "coefficient"}),
    ),
}

PHASES = ("generation", "experience", "training")


def write_report(out: Path) -> Path:
    """Write `out`/report.html, whole or not at all; return its path.

    Raises:
        DataError: `out` holds no step's results, or a file that can't be read.
    """
    page = render(read_results(out), out)
    report = out / "report.html"
    temporary = out / "report.html.tmp"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(report)
    return report


def render(results: Results, out: Path) -> str:
    """The page; `out` is what its commands name."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=duration, count=count, score=score, setting=setting)
    better, headline, others = findings(results)
    key_charts, charts = split_key_charts(
        {name: step_charts(step) for name, step in results.steps.items()}
    )
    return environment.get_template("report.html").render(
        better=better,
        headline=headline,
        others=others,
        results=results,
        rates=judge_rates(results),
        titles=TITLES,
        figures={name: before_after(step) for name, step in results.steps.items()},
        key_charts=key_charts,
        charts=charts,
        phases={name: phase_shares(step) for name, step in results.steps.items()},
        models=answering_models(results),
        chat_path=chat_path(results, out),
        out=out,
    )


def step_charts(step: StepResult) -> list[DrawnChart]:
    """Every chart of the step that has a curve of two points or more."""
    drawn: list[DrawnChart] = []
    for chart in CHARTS[step.name]:
        curves = [
            Curve(title, points, measured=name.startswith("eval_"))
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
    first = {
        name: drawn for name, of_step in charts.items() for drawn in of_step if drawn.chart.key
    }
    rest = {
        name: [drawn for drawn in of_step if not drawn.chart.key]
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


def answering_models(results: Results) -> list[str]:
    """The models that answered the sample prompts, earliest first."""
    return [model for model in JUDGED if any(model in sample.answers for sample in results.samples)]


def chat_path(results: Results, out: Path) -> Path | None:
    """The directory of the furthest model one can talk to."""
    for name, place in (("step3_ppo", "step3_ppo/actor"), ("step1_sft", "step1_sft")):
        if name in results.steps and results.steps[name].finished:
            return out / place
    return None


def count(number: int | float) -> str:
    """A large whole number in short: 1.2 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{number:,.0f}"


def setting(value: object) -> str:
    """A setting's value as one writes it on the command line or in YAML."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def main(argv: Sequence[str]) -> None:
    """Write the report of the output directory named in `argv`.

    Raises:
        UserError: no directory was named, or it has no results.
    """
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError("usage: python -m pipeline.report OUT, the --output-dir of a run")
    sys.stdout.write(f"{write_report(Path(argv[0]))}\n")


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
