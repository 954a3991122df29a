"""Methods as lines of a figure over the KL to the reference, distinct without colours."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pipeline.report.charts import Scale, tick_label
from pipeline.report.methods import FIGURES, Comparison, Method, shown
from pipeline.report.words import nats

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 12, 40

MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "M-3.5 -3.5H3.5V3.5H-3.5Z",
    "M0 -4.5L4.5 3.5H-4.5Z",
    "M0 -5L5 0L0 5L-5 0Z",
    "M0 4.5L4.5 -3.5H-4.5Z",
    "M-1.5 -5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5V-1.5H-1.5Z",
    "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z",
    "M0 -5L4.8 -1.5L2.9 4H-2.9L-4.8 -1.5Z",
    "M-5 -2H5V2H-5Z",
)
"""Outlines around (0, 0), one for each method."""

DASHES = ("none", "7 3", "2 3", "9 3 2 3", "12 4", "5 2 1 2 1 2", "1 4", "10 2 4 2", "3 6")
"""Of the lines between them."""

COLOURS = 4


@dataclass(frozen=True)
class Line:
    """How a method is drawn."""

    title: str
    colour: str
    dash: str
    mark: str


def lines_of(comparison: Comparison) -> list[Line]:
    """A line for each method, no two alike."""
    return [
        Line(
            method.title,
            f"c{place % COLOURS}",
            DASHES[place % len(DASHES)],
            MARKS[place % len(MARKS)],
        )
        for place, method in enumerate(comparison.methods)
    ]


def kl_chart(comparison: Comparison) -> Markup:
    """The evaluations of all methods, in the order of training; empty where there are none."""
    drawn = [method for method in comparison.methods if method.path]
    if not drawn:
        return Markup("")
    x, y = _scales(drawn, is_share=comparison.figure == "judge")
    parts = _grid(x, y)
    if comparison.kl is not None:
        at = Markup('<path class="equal" d="M{:.1f} {}V{}"><title>{}</title></path>')
        words = f"equal KL of {nats(comparison.kl)}"
        parts.append(at.format(x(comparison.kl), TOP, HEIGHT - BOTTOM, words))
    for method, line in zip(comparison.methods, lines_of(comparison), strict=True):
        parts += _method(method, line, comparison.figure, x, y)
    label = f"{FIGURES[comparison.figure]} over the KL to the reference, by method"
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, label, Markup("").join(parts)
    )


def _scales(methods: Sequence[Method], *, is_share: bool) -> tuple[Scale, Scale]:
    kls = [each.kl for method in methods for each in method.path]
    values = [each.mean for method in methods for each in method.path]
    low, high = min(0.0, *kls), max(kls)
    room = 0.08 * (max(values) - min(values)) or 0.1
    least, most = min(values) - room, max(values) + room
    if is_share:
        least, most = max(0.0, least), min(1.0, most)
    return (
        Scale(low, high if high > low else low + 1.0, LEFT, WIDTH - RIGHT),
        Scale(least, most, HEIGHT - BOTTOM, TOP),
    )


def _grid(x: Scale, y: Scale) -> list[Markup]:
    line = Markup('<path class="grid" d="M{} {:.1f}H{}"/>')
    text = Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [
        *(line.format(LEFT, y(value), WIDTH - RIGHT) for value in y.ticks),
        *(text.format(LEFT - 6, y(value) + 3.5, "end", tick_label(value)) for value in y.ticks),
        *(text.format(x(kl), HEIGHT - BOTTOM + 15, "middle", tick_label(kl)) for kl in x.ticks),
        text.format(middle, HEIGHT - 6, "middle", "KL to the reference, nats per answer"),
    ]


def _method(method: Method, line: Line, figure: str, x: Scale, y: Scale) -> list[Markup]:
    corners = "L".join(f"{x(each.kl):.1f} {y(each.mean):.1f}" for each in method.path)
    path = Markup('<path class="line {}" stroke-dasharray="{}" d="M{}"/>')
    mark = Markup(
        '<path class="dot {}" transform="translate({:.1f} {:.1f})" d="{}"><title>{}</title></path>'
    )
    # A line from the start to the end alone would show what nobody measured.
    joined = [path.format(line.colour, line.dash, corners)] if method.is_measured else []
    return [
        *joined,
        *(
            mark.format(
                line.colour,
                x(each.kl),
                y(each.mean),
                line.mark,
                f"{line.title}, step {each.step:g}: {shown(figure, each.mean)} at {nats(each.kl)}",
            )
            for each in method.path
        ),
    ]
