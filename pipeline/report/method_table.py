"""The table of methods side by side: what each ended with, for the page and for the terminal."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.progress import duration
from pipeline.report.intervals import Interval
from pipeline.report.methods import FIGURES, Comparison, Method, interval_of, shown
from pipeline.report.results import StepResult, known, mean
from pipeline.report.words import nats, percent


@dataclass(frozen=True)
class Row:
    """A method's row, in words; a dash where something is not known."""

    title: str
    cells: tuple[str, ...]
    """Under `heads`."""


DASH = "\N{EN DASH}"


def heads(comparison: Comparison) -> tuple[str, ...]:
    """The heads of the columns after the first."""
    of_equal = ("at equal KL", "the best is") if comparison.equal else ()
    ends = ("95 % interval", "KL", "length", "stops", "time", "samples")
    return (FIGURES[comparison.figure], *ends, *of_equal)


def rows(comparison: Comparison) -> list[Row]:
    """A row for each method."""
    return [_row(method, comparison) for method in comparison.methods]


def lines(comparison: Comparison) -> Iterator[str]:
    """The table as text, and below it the sentence and the notes."""
    table = [("method", *heads(comparison))]
    table += [(row.title, *row.cells) for row in rows(comparison)]
    widths = [max(len(line[place]) for line in table) for place in range(len(table[0]))]
    for first, *others in table:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
    yield from filter(None, (comparison.sentence, *comparison.notes))


def _row(method: Method, comparison: Comparison) -> Row:
    step, figure = method.step, comparison.figure
    ended = step.exported
    values = ended[1] if ended is not None and ended[0] == figure and step.finished else []
    kl, length, stops = (step.number(name) for name in ("kl", "length_after", "stop_rate"))
    return Row(
        method.title,
        (
            shown(figure, mean(known(values))) if known(values) else _instead(step),
            _interval(figure, interval_of(figure, values)),
            DASH if kl is None else nats(kl),
            DASH if length is None else f"{length:.1f}",
            DASH if stops is None else percent(stops),
            duration(step.seconds) if step.finished else DASH,
            f"{step.samples:,}" if step.samples else DASH,
            *_at_equal_kl(method, comparison),
        ),
    )


def _at_equal_kl(method: Method, comparison: Comparison) -> tuple[str, ...]:
    """The last two cells, where any method is compared there."""
    if not comparison.equal:
        return ()
    equal = next((each for each in comparison.equal if each.method is method), None)
    if equal is None:
        return DASH, DASH
    within = "" if equal.interval is None else f" ({_interval(comparison.figure, equal.interval)})"
    value = f"{shown(comparison.figure, equal.value)}{within}"
    return value, equal.against_best or "this one"


def _instead(step: StepResult) -> str:
    """What stands in place of a value."""
    return DASH if step.state == "finished" else step.state


def _interval(figure: str, interval: Interval | None) -> str:
    if interval is None:
        return DASH
    low, high = (shown(figure, end) for end in interval)
    return f"{low} to {high}"
