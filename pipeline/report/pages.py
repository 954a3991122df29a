"""HTML pages that need no other file. What is put into them is escaped."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.progress import duration
from pipeline.report.figures import score
from pipeline.report.results import Sample, SampleAnswer


def render_comparison(
    dialogues: Sequence[Sequence[tuple[str, str]]],
    answers: Mapping[str, Sequence[str]],
    *,
    titles: Mapping[str, str],
) -> str:
    """A page with two models' answers side by side.

    Args:
        dialogues: prompts, as (role, content) of each message.
        answers: of each model, one for each prompt.
        titles: what each model is called.
    """
    samples = [
        Sample(
            prompt=tuple(dialogue),
            answers={
                model: SampleAnswer(text=texts[row], score=None, stopped=True, marks={})
                for model, texts in answers.items()
            },
        )
        for row, dialogue in enumerate(dialogues)
    ]
    return (
        templates()
        .get_template("comparison.html")
        .render(
            samples=samples,
            models=list(answers),
            titles=titles,
            styles=dict(zip(answers, ("base", "after"), strict=True)),
        )
    )


def templates() -> Environment:
    """The pages' templates; all text that is put in is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=duration, count=count, score=score, setting=setting)
    return environment


def count(number: int | float) -> str:
    """A large whole number in short: 1.2 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{number:,.0f}"


def setting(value: object) -> str:
    """A setting's value as one writes it on the command line or in YAML."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
