"""Curves as inline SVG, with colors from the page's style, and the charts of a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from pipeline.report.results import StepResult

Point = tuple[float, float]

MAX_BINS = 300
"""Number of bins of a long curve; each keeps its minimum and maximum."""

COLORS = 4
"""Number of colors of the curves; further curves repeat them, dashed."""

METRICS = {
    "score": ("Score", "mean of sampled responses, by the reward model or all sources of rewards"),
    "accuracy": ("Accuracy", "pairs ordered correctly, or rows classified correctly"),
    "loss": ("Loss", "nats per token, or per pair"),
    "perplexity": ("Perplexity", "of held-out responses"),
    "margin": ("Margin", "implicit rewards, chosen minus rejected"),
    "gold": ("Gold reward", "measured, not trained on"),
    "reward_failures": ("Reward failures", "fraction of responses without a reward"),
    "kl": ("KL to the reference", "nats per response"),
    "response_length": ("Response length", "tokens"),
    "entropy": ("Entropy", "nats per token; near 0 means collapse"),
    "stop_rate": ("Stop rate", "fraction of responses that end before the length limit"),
    "clip_fraction": ("Clip fraction", "fraction of tokens outside the trust region"),
    "explained_variance": ("Explained variance", "of returns, by the critic; at most 1"),
    "ratio_max": ("Largest ratio", "new to old policy, for one token"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "rollout_gap": ("Rollout gap", "generation compared with training, nats"),
    "dead_right": ("All-correct groups", "fraction of prompts; they have no gradient"),
    "dead_wrong": ("All-wrong groups", "fraction of prompts; they have no gradient"),
    "repetition": ("Repetition", "fraction of tokens that end a repeated trigram"),
    "lr": ("Learning rate", ""),
    "logp_chosen": ("Log-probability, chosen", "nats per token"),
    "logp_rejected": ("Log-probability, rejected", "nats per token"),
    "tokens_per_second": ("Speed", "tokens per second"),
    "memory_gb": ("Memory", "peak of the largest process, GB"),
}
"""Metrics with their title and note, most important first; others follow by name."""

NO_CURVES = {"step", "seconds", "tokens", "skipped"}
"""Columns of metrics.jsonl for which no curve is drawn."""


@dataclass(frozen=True)
class DrawnChart:
    """A chart with its SVG picture."""

    title: str
    note: str
    names: Sequence[str]
    """Names of its curves."""

    picture: Markup
    last: str = ""
    """The last value of the last curve."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: Sequence[Point]

    measured: bool = False
    """Whether to draw dots without smoothing, for a few exact points such as evaluations."""


def step_charts(step: StepResult) -> list[DrawnChart]:
    """Draw all metrics with two or more points, in training and on held-out data."""
    columns = {name for line in step.metrics for name in line} - NO_CURVES
    metrics = sorted({column.removeprefix("eval_") for column in columns})
    order = {metric: index for index, metric in enumerate(METRICS)}
    drawn: list[DrawnChart] = []
    for metric in sorted(metrics, key=lambda name: order.get(name, len(order))):
        curves = [
            Curve(name, points, measured=column != metric)
            for column, name in ((metric, "training"), (f"eval_{metric}", "held out"))
            if column in columns and (points := step.series(column))
        ]
        if any(len(curve.points) > 1 for curve in curves):
            title, note = METRICS.get(metric, (metric.replace("_", " ").capitalize(), ""))
            label = f"{title} over the steps of {step.name}"
            last = f"{curves[-1].points[-1][1]:.4g}"
            names = [curve.name for curve in curves]
            picture = line_chart(curves, label, logarithmic=metric == "perplexity")
            drawn.append(DrawnChart(title, note, names, picture, last))
    return drawn


@dataclass(frozen=True)
class Scale:
    """Maps values, or with `logarithmic` their log10, from [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of `value`."""
        value = math.log10(value) if self.logarithmic else value
        fraction = (value - self.low) / (self.high - self.low)
        return self.start + fraction * (self.end - self.start)


LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 22
"""Margins of a picture."""


def line_chart(
    curves: Sequence[Curve],
    label: str,
    *,
    size: tuple[int, int] = (360, 180),
    logarithmic: bool = False,
    marker: float | None = None,
) -> Markup:
    """Draw curves as an SVG picture: raw values in pale lines, moving averages in strong ones.

    `label` is the alternative text, and `marker` the horizontal position of a vertical dashed line.
    With `logarithmic`, the vertical scale is logarithmic if all values are positive.
    """
    width, height = size
    points = [point for curve in curves for point in curve.points]
    x = Scale(*_limits([u for u, _ in points], margin=0.0), LEFT, width - RIGHT)
    values = [v for _, v in points]
    logarithmic = logarithmic and min(values) > 0
    limits = _limits([math.log10(v) for v in values] if logarithmic else values, margin=0.06)
    y = Scale(*limits, height - BOTTOM, TOP, logarithmic)
    parts = _grid(x, y)
    if marker is not None:
        line = Markup('<path class="equal" d="M{:.1f} {}V{}"/>')
        parts.append(line.format(x(marker), TOP, height - BOTTOM))
    for number, curve in enumerate(curves):
        parts += _draw_curve(curve, number, x, y)
    svg = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return svg.format(width, height, label, Markup("").join(parts))


def _draw_curve(curve: Curve, number: int, x: Scale, y: Scale) -> list[Markup]:
    style, dash = f"c{number % COLORS}", number // COLORS

    def path(points: Sequence[Point], kind: str) -> Markup:
        corners = "L".join(f"{x(u):.1f} {y(v):.1f}" for u, v in points)
        dashes = Markup(' stroke-dasharray="{} 3"').format(9 // dash) if dash else ""
        return Markup('<path class="{} {}"{} d="M{}"/>').format(kind, style, dashes, corners)

    if not curve.measured:
        return [path(decimate(curve.points), "raw"), path(decimate(smooth(curve.points)), "line")]
    dot = Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="3"><title>{}</title></circle>')
    dots = [dot.format(style, x(u), y(v), f"{curve.name}, {u:g}: {v:.4g}") for u, v in curve.points]
    # A line through two points would suggest measurements between them.
    return [*([path(curve.points, "line")] if len(dots) > 2 else []), *dots]


def _grid(x: Scale, y: Scale) -> list[Markup]:
    """Draw lines at round values, with labels on both axes."""
    line = Markup('<path class="grid" d="M{} {:.1f}H{}"/>')
    text = Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    y_ticks = ticks(y.low, y.high)
    if y.logarithmic:
        y_ticks = [10.0**exponent for exponent in y_ticks]
    has_whole_steps = x.low.is_integer() and x.high.is_integer()
    x_ticks = [v for v in ticks(x.low, x.high) if v.is_integer() or not has_whole_steps]
    return [
        *(line.format(LEFT, y(value), x.end) for value in y_ticks),
        *(
            text.format(LEFT - 6, y(value) + 3.5, "end", label)
            for value, label in zip(y_ticks, tick_labels(y_ticks), strict=True)
        ),
        *(
            text.format(x(value), y.start + 16, "middle", label)
            for value, label in zip(x_ticks, tick_labels(x_ticks), strict=True)
        ),
    ]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return a centered moving average over a fifteenth of the curve, narrower near its ends.

    A trailing moving average would lag behind a falling loss.
    """
    max_half_width = len(points) // 30
    sums = [0.0, *accumulate(value for _, value in points)]
    result: list[Point] = []
    for index, (step, _) in enumerate(points):
        half_width = min(max_half_width, index, len(points) - 1 - index)
        first, end = index - half_width, index + half_width + 1
        result.append((step, (sums[end] - sums[first]) / (end - first)))
    return result


def decimate(points: Sequence[Point], max_bins: int = MAX_BINS) -> list[Point]:
    """Reduce a long curve to the extremes of each of `max_bins` bins, in order."""
    if len(points) <= 2 * max_bins:
        return list(points)
    kept: list[Point] = []
    for index in range(max_bins):
        piece = points[len(points) * index // max_bins : len(points) * (index + 1) // max_bins]
        kept += sorted({min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])})
    return kept


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers within [low, high]."""
    rough = (high - low) / 5
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return short labels, with enough digits to distinguish them."""
    scaled = [(value / 1e3, "k") if 1e4 <= abs(value) < 1e6 else (value, "") for value in values]

    def labels(digits: int) -> list[str]:
        return [f"{number:.{digits}g}{unit}".replace("e-0", "e-") for number, unit in scaled]

    enough = (digits for digits in range(3, 8) if len(set(labels(digits))) == len(values))
    return labels(next(enough, 8))


def _limits(values: Sequence[float], *, margin: float) -> tuple[float, float]:
    """Return the minimum and maximum with a margin; they always differ."""
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(high)):
        half = abs(high) / 10 or 0.5
        return low - half, high + half
    pad = (high - low) * margin
    return low - pad, high + pad
