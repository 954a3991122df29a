"""Curves as inline SVG. Colours come from the page's style, so that they follow light and dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

Point = tuple[float, float]

MAX_BINS = 300
"""Longer curves keep the smallest and the largest value of each of this many pieces."""


@dataclass(frozen=True)
class Frame:
    """Size and margins of a picture."""

    width: int = 360
    height: int = 180
    left: int = 46
    right: int = 10
    top: int = 8
    bottom: int = 22

    def x(self, low: float, high: float) -> "Scale":
        """The horizontal scale."""
        return Scale(low, high, self.left, self.width - self.right)

    def y(self, low: float, high: float, *, logarithmic: bool = False) -> "Scale":
        """The vertical scale."""
        return Scale(low, high, self.height - self.bottom, self.top, logarithmic)


SMALL = Frame()


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: Sequence[Point]

    measured: bool = False
    """Few exact points, such as evaluations: drawn with dots, not smoothed."""

    exact: bool = False
    """Set rather than measured, such as a learning rate: not smoothed."""


@dataclass(frozen=True)
class Scale:
    """Maps values to positions: `low` to `start`, `high` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The position of `value`."""
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round numbers within the scale: powers of ten where it is logarithmic."""
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**exponent for exponent in range(first, last + 1)]
        return ticks(self.low, self.high)


def line_chart(curves: Sequence[Curve], *, label: str, logarithmic: bool = False) -> Markup:
    """Curves over steps: raw values pale, their moving average strong.

    Args:
        curves: each with a point or more.
        label: alternative text of the picture.
        logarithmic: the values, all positive, may span orders of magnitude; where they don't, the
            scale is linear.
    """
    values = [value for curve in curves for _, value in curve.points]
    x = SMALL.x(*_spread([step for curve in curves for step, _ in curve.points], margin=0.0))
    if logarithmic and min(values) > 0 and max(values) > 20 * min(values):
        y = SMALL.y(min(values) / 1.3, max(values) * 1.3, logarithmic=True)
    else:
        y = SMALL.y(*_spread(values, margin=0.06))
    parts = grid(SMALL, x, y, whole_steps=True)
    for number, curve in enumerate(curves):
        style, points = f"line c{number}", curve.points
        if curve.measured:
            # A line through two points would look like a curve that was measured between them.
            parts += [path(points, x, y, style)] if len(points) > 2 else []
            parts += dots(points, x, y, number, "step {:g}: {:.4g}")
        elif curve.exact:
            parts.append(path(thinned(points), x, y, style))
        else:
            parts.append(path(thinned(points), x, y, f"raw c{number}"))
            parts.append(path(thinned(smoothed(points)), x, y, style))
    return picture(SMALL, parts, label)


def picture(frame: Frame, parts: Sequence[Markup], label: str) -> Markup:
    """The parts as one SVG element."""
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        frame.width, frame.height, label, Markup("").join(parts)
    )


def grid(frame: Frame, x: Scale, y: Scale, *, whole_steps: bool = False) -> list[Markup]:
    """Lines at round values, with labels on both axes; `whole_steps` labels integers alone."""
    line = Markup('<path class="grid" d="M{} {:.1f}H{}"/>')
    below = frame.height - frame.bottom + (17 if frame is SMALL else 15)
    columns = [value for value in x.ticks if not whole_steps or value.is_integer()]
    return [
        *(line.format(frame.left, y(value), frame.width - frame.right) for value in y.ticks),
        *(text(frame.left - 6, y(each) + 3.5, "end", tick_label(each)) for each in y.ticks),
        *(text(x(each), below, "middle", tick_label(each)) for each in columns),
    ]


def text(x: float, y: float, anchor: str, words: str) -> Markup:
    """A label."""
    form = Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    return form.format(x, y, anchor, words)


def path(points: Sequence[Point], x: Scale, y: Scale, style: str, dash: str = "") -> Markup:
    """A line through points."""
    corners = "L".join(f"{x(one):.1f} {y(two):.1f}" for one, two in points)
    dashes = Markup(' stroke-dasharray="{}"').format(dash) if dash else ""
    return Markup('<path class="{}"{} d="M{}"/>').format(style, dashes, corners)


def dots(points: Sequence[Point], x: Scale, y: Scale, number: int, words: str) -> list[Markup]:
    """Dots of a curve; `words` describe each one."""
    dot = Markup('<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="3"><title>{}</title></circle>')
    return [dot.format(number, x(one), y(two), words.format(one, two)) for one, two in points]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """The mean of each point and its neighbours on both sides, a fifteenth of the curve in all.

    Windows at the ends are narrower but symmetric: a moving average of the past alone would trail
    behind a falling loss.
    """
    reach = len(points) // 30
    sums = [0.0, *accumulate(value for _, value in points)]
    result: list[Point] = []
    for index, (step, _) in enumerate(points):
        near = min(reach, index, len(points) - 1 - index)
        first, end = index - near, index + near + 1
        result.append((step, (sums[end] - sums[first]) / (end - first)))
    return result


def thinned(points: Sequence[Point], max_bins: int = MAX_BINS) -> list[Point]:
    """At most two points for each of `max_bins` pieces of the curve: its extremes, in order."""
    if len(points) <= 2 * max_bins:
        return list(points)
    kept: list[Point] = []
    for index in range(max_bins):
        start, end = (len(points) * each // max_bins for each in (index, index + 1))
        piece = points[start:end]
        extremes = {min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])}
        kept += sorted(extremes)
    return kept


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers within [low, high]."""
    rough = (high - low) / 5
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_label(value: float) -> str:
    """A number in about six characters."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:.6g}"


def _spread(values: Sequence[float], *, margin: float) -> tuple[float, float]:
    """Least and greatest value with a margin; never the same number twice."""
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(high)):
        half = abs(high) / 10 or 0.5
        return low - half, high + half
    pad = (high - low) * margin
    return low - pad, high + pad
