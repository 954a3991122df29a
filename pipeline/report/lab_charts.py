"""Charts of a reward model: how calibrated it is, and what the best of n is worth."""

from collections.abc import Sequence

from markupsafe import Markup

from pipeline.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Point, Scale, tick_label


def reliability_chart(points: Sequence[Point]) -> Markup:
    """Accuracy over confidence, a dot for each bin; calibrated ones lie on the diagonal."""
    low = min(0.5, *(min(point) for point in points))
    x = Scale(low, 1.0, LEFT, WIDTH - RIGHT)
    y = Scale(low, 1.0, HEIGHT - BOTTOM, TOP)
    parts = grid(x, y)
    parts.append(_path([(low, low), (1.0, 1.0)], x, y, "raw c1"))
    parts += _line(points, x, y, 0, "confidence {:.3f}: {:.3f} right")
    return _drawn(parts, "Accuracy over confidence")


def best_of_chart(proxy: Sequence[Point], gold: Sequence[Point]) -> Markup:
    """Proxy and truth over KL, each scaled to what it gains, so that both fit one picture."""
    values = [value for _, value in (*proxy, *gold)]
    x = Scale(0.0, max([0.1, *(step for step, _ in proxy)]), LEFT, WIDTH - RIGHT)
    y = Scale(min(values), max([*values, min(values) + 1e-6]), HEIGHT - BOTTOM, TOP)
    parts = grid(x, y)
    for place, points in enumerate((proxy, gold)):
        parts += _line(points, x, y, place, "KL {:.2f}: {:.3f}")
    return _drawn(parts, "The best of n over its KL bound")


def grid(x: Scale, y: Scale) -> list[Markup]:
    """Lines at round values, with labels on both axes."""
    line = Markup('<path class="grid" d="M{} {:.1f}H{}"/>')
    text = Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    return [
        *(line.format(LEFT, y(value), WIDTH - RIGHT) for value in y.ticks),
        *(text.format(LEFT - 6, y(value) + 3.5, "end", tick_label(value)) for value in y.ticks),
        *(text.format(x(value), HEIGHT - 5, "middle", tick_label(value)) for value in x.ticks),
    ]


def _line(points: Sequence[Point], x: Scale, y: Scale, place: int, words: str) -> list[Markup]:
    dot = Markup('<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="3"><title>{}</title></circle>')
    dots = [dot.format(place, x(one), y(two), words.format(one, two)) for one, two in points]
    return [_path(points, x, y, f"line c{place}"), *dots]


def _path(points: Sequence[Point], x: Scale, y: Scale, style: str) -> Markup:
    corners = "L".join(f"{x(one):.1f} {y(two):.1f}" for one, two in points)
    return Markup('<path class="{}" d="M{}"/>').format(style, corners)


def _drawn(parts: Sequence[Markup], label: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, label, Markup("").join(parts)
    )
