"""Writing the report from whatever the steps left in the output directory.

The file needs nothing else: style and curves are inside. Text of models and data is escaped.
"""

from collections.abc import Sequence
from pathlib import Path

from pipeline.installation import CHAT
from pipeline.report.curves import phase_shares, split_key_charts, step_charts
from pipeline.report.findings import (
    BASE,
    Finding,
    before_after,
    findings,
    pass_rates,
    title,
    trivial_rates,
)
from pipeline.report.pages import templates
from pipeline.report.results import Results, read_results


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
    first, *others = findings(results)
    models = answering_models(results)
    key_charts, charts = split_key_charts(
        {name: step_charts(step) for name, step in results.steps.items()}
    )
    return (
        templates()
        .get_template("report.html")
        .render(
            verdict=verdict(first),
            headline=first.sentence,
            detail=first.detail,
            others=[finding.whole for finding in others],
            results=results,
            rates=pass_rates(results),
            trivial=trivial_rates(results),
            titles={name: title(name, results) for name in (*results.steps, *models, BASE)},
            styles=styles(models),
            scored=results.evaluated_by("win_rate"),
            rewarded=results.evaluated_by("reward_after") is not None,
            figures={name: before_after(step) for name, step in results.steps.items()},
            key_charts=key_charts,
            charts=charts,
            phases={name: phase_shares(step) for name, step in results.steps.items()},
            models=models,
            chat_command=CHAT,
            chat_path=chat_path(results, out),
            out=out,
        )
    )


def verdict(finding: Finding) -> tuple[str, str] | None:
    """(style, words) of the mark beside the headline; None where there is no finding."""
    match finding.verdict:
        case "better" if finding.optimized:
            return "yes", "It scores higher, by what it was trained on"
        case "better":
            return "yes", "It got better"
        case "worse":
            return "no", "It got worse"
        case "not told apart":
            return "unclear", "Better and worse can't be told apart"
        case None:
            return None


def answering_models(results: Results) -> list[str]:
    """The models that answered the sample prompts or were judged, earliest first."""
    names = [name for sample in results.samples for name in sample.answers]
    return list(dict.fromkeys((*pass_rates(results), *names)))


def styles(models: Sequence[str]) -> dict[str, str]:
    """The colour of each model: grey of the base, then blue, and green of the last."""
    *earlier, last = models or [BASE]
    return {name: BASE if name == BASE else "before" for name in earlier} | {last: "after"}


def chat_path(results: Results, out: Path) -> Path | None:
    """The directory of the furthest model one can talk to."""
    for name, step in reversed(list(results.steps.items())):
        if step.finished and step.has("win_rate"):
            return out / name / "actor"
        if step.finished and step.has("perplexity_after"):
            return out / name
    return None
