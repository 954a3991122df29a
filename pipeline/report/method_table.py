"""The table of methods side by side: what each ended with, for the page and for the terminal."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.progress import duration
from pipeline.report.intervals import Interval
from pipeline.report.methods import FIGURES, Comparison, Method, interval_of, known, shown
from pipeline.report.results import StepResult, mean
from pipeline.report.words import nats, percent


@dataclass(frozen=True)
class Row:
    """Of a method, in words; a dash where something is not known."""

    title: str
    value: str
    """Of the exported model's sampled answers to all held-out prompts."""
    interval: str
    kl: str
    length: str
    stop_rate: str
    time: str
    samples: str
    at_equal_kl: str = ""
    against_best: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """What follows the title."""
        return (
            *(self.value, self.interval, self.kl, self.length, self.stop_rate),
            *(self.time, self.samples, self.at_equal_kl, self.against_best),
        )


DASH = "\N{EN DASH}"


def heads(comparison: Comparison) -> tuple[str, ...]:
    """Of the columns after the first."""
    of_equal = ("at equal KL", "the best is") if comparison.equal else ()
    ends = ("95 % interval", "KL", "length", "stops", "time", "samples")
    return (FIGURES[comparison.figure], *ends, *of_equal)


def rows(comparison: Comparison) -> list[Row]:
    """A row for each method."""
    return [_row(method, comparison) for method in comparison.methods]


def lines(comparison: Comparison) -> Iterator[str]:
    """The table as text, and below it the sentence and the notes."""
    table = [("method", *heads(comparison))]
    table += [(row.title, *row.cells[: len(heads(comparison))]) for row in rows(comparison)]
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
    equal = next((each for each in comparison.equal if each.method is method), None)
    of_equal = "" if equal is None else _with_interval(figure, equal.value, equal.interval)
    return Row(
        title=method.title,
        value=shown(figure, mean(known(values))) if known(values) else _instead(step),
        interval=_interval(figure, interval_of(figure, values)),
        kl=DASH if kl is None else nats(kl),
        length=DASH if length is None else f"{length:.1f}",
        stop_rate=DASH if stops is None else percent(stops),
        time=duration(step.seconds) if step.finished else DASH,
        samples=f"{step.samples:,}" if step.samples else DASH,
        at_equal_kl=of_equal or DASH,
        against_best=DASH if equal is None else equal.against_best or "this one",
    )


def _instead(step: StepResult) -> str:
    """What stands in place of a value."""
    return DASH if step.state == "finished" else step.state


def _interval(figure: str, interval: Interval | None) -> str:
    if interval is None:
        return DASH
    low, high = (shown(figure, end) for end in interval)
    return f"{low} to {high}"


def _with_interval(figure: str, value: float, interval: Interval | None) -> str:
    within = "" if interval is None else f" ({_interval(figure, interval)})"
    return f"{shown(figure, value)}{within}"
