"""Writing the report from whatever the steps left in the output directory.

The file needs nothing else: style and curves are inside. Text of models and data is escaped.
"""

from collections.abc import Sequence
from pathlib import Path

from pipeline.installation import CHAT
from pipeline.report.curves import phase_shares, split_key_charts, step_charts
from pipeline.report.figures import BASE, before_after, listed, pass_rates, title
from pipeline.report.findings import Finding, findings
from pipeline.report.lab import view
from pipeline.report.methods import compare_methods, heads, kl_chart, lines_of, rows
from pipeline.report.pages import templates
from pipeline.report.results import (
    Results,
    StepResult,
    events_of,
    model_to_talk_to,
    read_results,
)


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
    compared = compare_methods(results)
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
            titles={name: title(name, results) for name in (*results.steps, *models, BASE)},
            styles=styles(models, [step.name for step in results.methods]),
            compared=compared,
            compared_heads=heads(compared) if compared else (),
            compared_rows=rows(compared) if compared else (),
            compared_chart=kl_chart(compared) if compared else "",
            compared_lines=lines_of(compared) if compared else (),
            scored=next(iter(optimizing_scores(results)), None),
            trained=trained_models(results),
            rewarded=results.evaluated_by("reward_after") is not None,
            figures={name: before_after(step) for name, step in results.steps.items()},
            key_charts=key_charts,
            charts=charts,
            guards={name: events_of(step) for name, step in results.steps.items()},
            phases={name: phase_shares(step) for name, step in results.steps.items()},
            labs={name: view(step.lab) for name, step in results.steps.items() if step.lab},
            models=models,
            chat_command=CHAT,
            chat_path=chat_path(results, out),
            out=out,
        )
    )


def trained_models(results: Results) -> str:
    """What the sentence about rewards is about: the methods, or the one there is."""
    steps = optimizing_scores(results)
    return listed([title(step.name, results) for step in steps]) if steps else ""


def optimizing_scores(results: Results) -> list[StepResult]:
    """The steps that learned from rewards, which learning from preferences does not."""
    scored = results.evaluated_by("win_rate")
    steps = results.methods or ([scored] if scored else [])
    return [step for step in steps if not step.has("margin_after")]


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


def styles(models: Sequence[str], methods: Sequence[str] = ()) -> dict[str, str]:
    """The colour of each model: grey of the base, then blue, and green of the last.

    Several `methods` are all the last.
    """
    *earlier, last = models or [BASE]
    return {
        **{name: BASE if name == BASE else "before" for name in earlier},
        **dict.fromkeys([*methods, last], "after"),
    }


def chat_path(results: Results, out: Path) -> Path | None:
    """The directory of the furthest model one can talk to."""
    step = model_to_talk_to(results.steps)
    if step is None:
        return None
    return out / step.name / "actor" if step.has("win_rate") else out / step.name
