"""HTML pages that load nothing: the report of a run, and a reward model's figures.

Text of models and data is escaped.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.report.charts import Curve, DrawnChart, line_chart, step_charts
from pipeline.report.figures import BASE, before_after, listed, pass_rates, score, title
from pipeline.report.findings import findings
from pipeline.report.methods import compare_methods, heads, kl_chart, rows
from pipeline.report.results import (
    LAB,
    Results,
    events_of,
    finite,
    mapping,
    model_directory,
    model_to_talk_to,
    read_results,
)
from pipeline.system.errors import DataError
from pipeline.system.installation import CHAT
from pipeline.system.logs import duration


def write_report(out: Path) -> Path:
    """Write `out`/report.html atomically; return its path.

    Raises:
        DataError: `out` holds no step's results, or a file that can't be read.
    """
    return _write(out, render(read_results(out), out))


def render(results: Results, out: Path) -> str:
    """The report of the output directory `out`."""
    compared = compare_methods(results)
    answers = [name for sample in results.samples for name in sample["answers"]]
    models = list(dict.fromkeys((*pass_rates(results), *answers)))
    scored = results.evaluated_by("win_rate")
    optimized = results.methods or ([scored] if scored and scored.finished else [])
    optimized = [step for step in optimized if not step.has("margin_after")]
    talking = model_to_talk_to(results.steps)
    return _template("report.html").render(
        findings=findings(results),
        results=results,
        rates=pass_rates(results),
        titles={name: title(name, results) for name in (*results.steps, *models, BASE)},
        styles=_styles(models),
        compared=compared,
        table=[heads(compared), *rows(compared)] if compared else [],
        kl_chart=kl_chart(compared) if compared else None,
        trained=listed([title(step.name, results) for step in optimized]) if optimized else "",
        figures={name: before_after(step) for name, step in results.steps.items()},
        charts={name: step_charts(step) for name, step in results.steps.items()},
        guards={name: events_of(step) for name, step in results.steps.items()},
        labs={name: lab_parts(step.lab) for name, step in results.steps.items() if step.lab},
        models=models,
        chat=f"{CHAT} --path {model_directory(out, talking)}" if talking else "",
        out=out,
    )


def _styles(models: Sequence[str]) -> dict[str, str]:
    """The colour of each model: grey for the base, green for the last, blue for the others."""
    styles = {name: BASE if name == BASE else "before" for name in models}
    return styles | dict.fromkeys(models[-1:], "after")


def lab_parts(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Sentences, confusion matrix and charts of a reward model's laboratory (lab.json)."""
    names = [str(row["name"]) for row in figures.get("classes") or []]
    matrix = figures.get("confusion") or []
    return {
        "sentences": figures.get("sentences") or [],
        "classes": names,
        "confusion": list(zip(names, matrix, strict=False)),
        "charts": [*_reliability(figures), *_best_of(figures)],
    }


def _reliability(figures: Mapping[str, Any]) -> list[DrawnChart]:
    """Accuracy over confidence, a dot for each bin; calibrated ones are on the diagonal."""
    bins = mapping(figures.get("calibration")).get("bins")
    points = [
        (confidence, accuracy)
        for row in (bins if isinstance(bins, list) else [])
        if (confidence := finite(row.get("confidence"))) is not None
        and (accuracy := finite(row.get("accuracy"))) is not None
    ]
    low = min((min(point) for point in points), default=0.0)
    diagonal = Curve("calibrated", [(low, low), (1.0, 1.0)])
    return _lab_chart(
        "Reliability",
        "accuracy over confidence",
        Curve("measured", points, measured=True),
        diagonal,
    )


def _best_of(figures: Mapping[str, Any]) -> list[DrawnChart]:
    """Score, scaled to its gain, and share judged right of the best of n over its KL bound."""
    table = figures.get("best_of") or []
    curves = {
        name: [(finite(row.get("kl")) or 0.0, finite(row.get(name)) or 0.0) for row in table]
        for name in ("proxy", "gold")
    }
    if proxy := curves["proxy"]:
        first, spread = proxy[0][1], max(value for _, value in proxy) - proxy[0][1] or 1.0
        curves["proxy"] = [(kl, (value - first) / spread) for kl, value in proxy]
    return _lab_chart(
        "Over-optimization",
        "best of n over its KL bound, in nats",
        Curve("score, scaled to its gain", curves["proxy"], measured=True),
        Curve("judged right by a program", curves["gold"], measured=True),
    )


def _lab_chart(heading: str, note: str, *curves: Curve) -> list[DrawnChart]:
    if not curves[0].points:
        return []
    return [DrawnChart(heading, note, [c.name for c in curves], line_chart(curves, heading))]


def write_lab(directory: Path, *, heading: str) -> Path:
    """Write report.html of the lab.json in `directory`; return its path.

    Raises:
        DataError: the file is not JSON.
    """
    try:
        figures = json.loads((directory / LAB).read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{directory / LAB} is not valid JSON: {error}") from None
    page = _template("parts.html").module.lab_page(heading, lab_parts(figures))
    return _write(directory, page)


def _write(directory: Path, page: str) -> Path:
    report, temporary = directory / "report.html", directory / "report.html.tmp"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(report)
    return report


def _template(name: str) -> Any:  # noqa: ANN401  # jinja2's templates have untyped modules
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=duration, count=count, score=score, setting=setting)
    return environment.get_template(name)


def count(number: int | float) -> str:
    """A large whole number in short: 1.2 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{number:,.0f}"


def setting(value: object) -> str:
    """A setting's value as on the command line or in YAML."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
