"""The report of a run, a self-contained HTML page.

Text from models and data is escaped.
"""

import json
import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.files.durable import write_atomically
from pipeline.report.charts import step_charts
from pipeline.report.figures import BASE, before_after, join_names, pass_rates, score, title
from pipeline.report.findings import findings
from pipeline.report.methods import compare_methods, draw_kl_chart, header, rows
from pipeline.report.results import Results, find_chat_model, model_directory, read_results
from pipeline.system.installation import CHAT
from pipeline.system.logs import format_duration


def write_report(out: Path) -> Path:
    """Write `out`/report.html atomically; return its path.

    Raises:
        DataError: `out` has no results, or a file can't be read.
    """
    report = out / "report.html"
    write_atomically(report, render(read_results(out), out).encode())
    return report


def render(results: Results, out: Path) -> str:
    """Return the HTML report of the output directory `out`."""
    compared = compare_methods(results)
    answers = [name for sample in results.samples for name in sample["answers"]]
    models = list(dict.fromkeys((*pass_rates(results), *answers)))
    scored = results.last_step_with("win_rate")
    optimized = results.methods or ([scored] if scored and scored.finished else [])
    optimized = [step for step in optimized if not step.has("margin_after")]
    chat_model = find_chat_model(results.steps)
    chat_path = shlex.quote(str(model_directory(out, chat_model))) if chat_model else ""
    # The base model is grey, the last one green, the others blue.
    styles = {name: BASE if name == BASE else "before" for name in models}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=format_duration, count=count, score=score, setting=setting)
    return environment.get_template("report.html").render(
        findings=findings(results),
        results=results,
        rates=pass_rates(results),
        titles={name: title(name, results) for name in (*results.steps, *models, BASE)},
        styles=styles | dict.fromkeys(models[-1:], "after"),
        compared=compared,
        table=[header(compared), *rows(compared)] if compared else [],
        kl_chart=draw_kl_chart(compared) if compared else None,
        trained=join_names([title(step.name, results) for step in optimized]) if optimized else "",
        figures={name: before_after(step) for name, step in results.steps.items()},
        charts={name: step_charts(step) for name, step in results.steps.items()},
        guards={name: step.events for name, step in results.steps.items()},
        models=models,
        chat=f"{CHAT} --path {chat_path}" if chat_model else "",
        out=out,
    )


def count(number: int | float) -> str:
    """Format a number without decimals; abbreviate a large one, as in 1.2 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{number:,.0f}"


def setting(value: object) -> str:
    """Format a setting's value as on the command line or in YAML."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
