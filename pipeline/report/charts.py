"""Curves as inline SVG. Colours come from the page's style, so that they follow light and dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

Point = tuple[float, float]

WIDTH, HEIGHT = 360, 180
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 22
MAX_BINS = 300
"""Longer curves keep the smallest and the largest value of each of this many pieces."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: Sequence[Point]

    measured: bool = False
    """Few exact points, such as evaluations: drawn as they are, with dots, not smoothed."""

    exact: bool = False
    """Set rather than measured, such as a learning rate: drawn as it is."""


@dataclass(frozen=True)
class Scale:
    """Maps values to positions: `low` to `start`, `high` to `end`."""

    low: float
    high: float
    start: int | float
    end: int | float
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
            exponents = range(
                math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1
            )
            return [10.0**exponent for exponent in exponents]
        return ticks(self.low, self.high)


def line_chart(curves: Sequence[Curve], *, label: str, logarithmic: bool = False) -> Markup:
    """The curves over steps: raw values pale, their moving average strong.

    Args:
        curves: each with a point or more.
        label: is read out where the picture can't be seen.
        logarithmic: the values, all positive, may span orders of magnitude; where they do not, the
            scale is linear all the same.
    """
    values = [value for curve in curves for _, value in curve.points]
    x_low, x_high = _spread([step for curve in curves for step, _ in curve.points], margin=0.0)
    x = Scale(x_low, x_high, LEFT, WIDTH - RIGHT)
    if logarithmic and min(values) > 0 and max(values) > 20 * min(values):
        y = Scale(min(values) / 1.3, max(values) * 1.3, HEIGHT - BOTTOM, TOP, logarithmic=True)
    else:
        y = Scale(*_spread(values, margin=0.06), HEIGHT - BOTTOM, TOP)
    parts = _grid(x, y)
    for place, curve in enumerate(curves):
        parts += _curve(curve, x, y, place)
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, label, Markup("").join(parts)
    )


def smoothed(points: Sequence[Point]) -> list[Point]:
    """The mean of each point and its neighbours on both sides, a fifteenth of the curve in all.

    Windows at the ends are narrower, never lopsided: a moving average that looks back only would
    trail behind a falling loss.
    """
    reach = len(points) // 30
    sums = [0.0, *accumulate(value for _, value in points)]
    result: list[Point] = []
    for place, (step, _) in enumerate(points):
        near = min(reach, place, len(points) - 1 - place)
        first, end = place - near, place + near + 1
        result.append((step, (sums[end] - sums[first]) / (end - first)))
    return result


def thinned(points: Sequence[Point], max_bins: int = MAX_BINS) -> list[Point]:
    """At most two points for each of `max_bins` pieces of the curve: its extremes, in order."""
    if len(points) <= 2 * max_bins:
        return list(points)
    kept: list[Point] = []
    for place in range(max_bins):
        start, end = (len(points) * p // max_bins for p in (place, place + 1))
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
    return [round(place * step, 12) for place in range(first, last + 1)]


def tick_label(value: float) -> str:
    """A tick's number in at most six characters or so."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.6g}"


def _spread(values: Sequence[float], *, margin: float) -> tuple[float, float]:
    """Least and greatest value with a margin; never the same number twice."""
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(high)):
        half = abs(high) / 10 or 0.5
        return low - half, high + half
    pad = (high - low) * margin
    return low - pad, high + pad


def _grid(x: Scale, y: Scale) -> list[Markup]:
    line = Markup('<path class="grid" d="M{} {:.1f}H{}"/>')
    text = Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    rows, columns = y.ticks, x.ticks
    return [
        *(line.format(LEFT, y(value), WIDTH - RIGHT) for value in rows),
        *(text.format(LEFT - 6, y(value) + 3.5, "end", tick_label(value)) for value in rows),
        *(
            text.format(x(step), HEIGHT - 5, "middle", tick_label(step))
            for step in columns
            if step.is_integer()
        ),
    ]


def _curve(curve: Curve, x: Scale, y: Scale, place: int) -> list[Markup]:
    if curve.measured:
        dots = [
            Markup(
                '<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="3"><title>{}</title></circle>'
            ).format(place, x(step), y(value), f"step {step:g}: {value:.4g}")
            for step, value in curve.points
        ]
        # A line through two points would look like a curve that nobody measured.
        path = [_path(curve.points, x, y, f"line c{place}")] if len(curve.points) > 2 else []
        return [*path, *dots]
    if curve.exact:
        return [_path(thinned(curve.points), x, y, f"line c{place}")]
    raw = _path(thinned(curve.points), x, y, f"raw c{place}")
    return [raw, _path(thinned(smoothed(curve.points)), x, y, f"line c{place}")]


def _path(points: Sequence[Point], x: Scale, y: Scale, style: str) -> Markup:
    corners = "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in points)
    return Markup('<path class="{}" d="M{}"/>').format(style, corners)
