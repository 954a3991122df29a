"""What the laboratory measured of a reward model, as a part of the report or a page of its own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from pipeline.errors import DataError
from pipeline.report.charts import SMALL, Point, dots, grid, path, picture
from pipeline.report.figures import percent
from pipeline.report.pages import templates
from pipeline.report.results import LAB, finite, mapping


@dataclass(frozen=True)
class Table:
    """Figures in rows."""

    title: str
    note: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A chart with the names of its curves."""

    title: str
    note: str
    names: Sequence[str]
    picture: Markup


@dataclass(frozen=True)
class LabView:
    """What is shown."""

    sentences: Sequence[str]
    tables: Sequence[Table]
    pictures: Sequence[Picture]


def read_lab(directory: Path) -> Mapping[str, object]:
    """The figures in a directory; empty where there are none.

    Raises:
        DataError: the file is not a JSON object.
    """
    path = directory / LAB
    if not path.is_file():
        return {}
    try:
        return mapping(json.loads(path.read_text("utf-8")))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from None


def view(figures: Mapping[str, object]) -> LabView | None:
    """The view of what was measured; None of nothing."""
    if not figures:
        return None
    sentences = figures.get("sentences")
    tables = [
        _bench(figures),
        _confusion(figures),
        _classes(figures),
        _length(figures),
        _probes(figures),
    ]
    pictures = [_reliability(figures), _best_of(figures)]
    return LabView(
        sentences=[str(each) for each in _list(sentences)],
        tables=[table for table in tables if table],
        pictures=[picture for picture in pictures if picture],
    )


def write_page(directory: Path, *, title: str) -> Path:
    """Write report.html of what the laboratory left in `directory`; return its path."""
    shown = view(read_lab(directory))
    page = templates().get_template("lab.html").render(lab=shown, title=title)
    report = directory / "report.html"
    temporary = directory / "report.html.tmp"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(report)
    return report


def _bench(figures: Mapping[str, object]) -> Table | None:
    found = mapping(figures.get("bench"))
    if not found:
        return None
    rows = [mapping(each) for each in _list(found.get("subsets"))]
    return Table(
        "RewardBench 2",
        f"{_share(found.get('value'))} in the mean of the subsets",
        ["subset", "prompts", "score", "95 % interval", "random score"],
        [
            [
                str(row.get("name")),
                str(row.get("rows")),
                _share(row.get("value")),
                f"{_share(row.get('low'))} to {_share(row.get('high'))}" if "low" in row else "",
                _share(row.get("chance")),
            ]
            for row in rows
        ],
    )


def _confusion(figures: Mapping[str, object]) -> Table | None:
    rows = [_list(row) for row in _list(figures.get("confusion"))]
    names = [str(each.get("name")) for each in _classes_of(figures)]
    if not rows or len(names) != len(rows):
        return None
    return Table(
        "Confusion",
        "rows of each class, by the class they are taken for",
        ["class", *names],
        [[name, *map(str, row)] for name, row in zip(names, rows, strict=True)],
    )


def _classes(figures: Mapping[str, object]) -> Table | None:
    found = _classes_of(figures)
    if not found:
        return None
    names = ("precision", "recall", "f1", "auc")
    return Table(
        "Classes",
        "each against all others",
        ["class", "rows", "precision", "recall", "F1", "AUC"],
        [
            [str(each.get("name")), str(each.get("rows")), *(_share(each.get(n)) for n in names)]
            for each in found
        ],
    )


def _length(figures: Mapping[str, object]) -> Table | None:
    found = mapping(figures.get("length"))
    if not found:
        return None
    longer, shorter = (mapping(found.get(f"better_{name}")) for name in ("longer", "shorter"))
    rows = [
        ("rank correlation of score and length", _number(found.get("spearman"))),
        ("the same of the data's preference", _number(found.get("of_data"))),
        ("in order, better response longer", _with_interval(longer)),
        ("in order, better response shorter", _with_interval(shorter)),
        ("always taking the longer", _share(found.get("always_longer"))),
        ("always taking the shorter", _share(found.get("always_shorter"))),
    ]
    return Table("Length", "within prompts, in tokens", ["figure", "value"], rows)


def _probes(figures: Mapping[str, object]) -> Table | None:
    found = mapping(figures.get("probes"))
    if not found:
        return None
    words = {"no_end": "without its end", "truncated": "cut in half", "doubled": "repeated"}
    rows = [
        [
            words.get(name, name),
            _number(mapping(each).get("change")),
            _share(mapping(each).get("lower")),
        ]
        for name, each in found.items()
    ]
    heads = ["good response", "change", "scores lower"]
    return Table("Probes", "change in standard deviations of the score", heads, rows)


def _reliability(figures: Mapping[str, object]) -> Picture | None:
    found = mapping(figures.get("calibration"))
    bins = [mapping(each) for each in _list(found.get("bins"))]
    points = [(finite(each.get("confidence")), finite(each.get("accuracy"))) for each in bins]
    known = [(one, two) for one, two in points if one is not None and two is not None]
    if not known:
        return None
    note = f"accuracy over confidence, at temperature {_number(found.get('temperature'))}"
    names = ("measured", "calibrated")
    return Picture("Reliability", note, names, reliability_chart(known))


def _best_of(figures: Mapping[str, object]) -> Picture | None:
    rows = [mapping(each) for each in _list(figures.get("best_of"))]
    if len(rows) < 2:
        return None
    points = {
        name: [(finite(row.get("kl")) or 0.0, finite(row.get(name)) or 0.0) for row in rows]
        for name in ("proxy", "gold")
    }
    spread = max(value for _, value in points["proxy"]) - points["proxy"][0][1] or 1.0
    first = points["proxy"][0][1]
    scaled = [(kl, (value - first) / spread) for kl, value in points["proxy"]]
    note = f"best of 1 to {rows[-1].get('n')} over its KL bound, in nats"
    names = ("score, scaled to its gain", "judged right by a program")
    return Picture("Over-optimization", note, names, best_of_chart(scaled, points["gold"]))


def _classes_of(figures: Mapping[str, object]) -> list[Mapping[str, object]]:
    return [mapping(each) for each in _list(figures.get("classes"))]


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _share(value: object) -> str:
    number = finite(value)
    return "" if number is None else percent(number)


def _number(value: object) -> str:
    number = finite(value)
    return "" if number is None else f"{number:.3g}"


def _with_interval(value: Mapping[str, object]) -> str:
    if not value:
        return "no pairs"
    low, high = _share(value.get("low")), _share(value.get("high"))
    return f"{_share(value.get('value'))} of {value.get('count')} ({low} to {high})"


def reliability_chart(points: Sequence[Point]) -> Markup:
    """Accuracy over confidence, a dot for each bin; calibrated ones lie on the diagonal."""
    low = min(0.5, *(min(point) for point in points))
    x, y = SMALL.x(low, 1.0), SMALL.y(low, 1.0)
    parts = [*grid(SMALL, x, y), path([(low, low), (1.0, 1.0)], x, y, "raw c1")]
    parts += [path(points, x, y, "line c0")]
    parts += dots(points, x, y, 0, "confidence {:.3f}: {:.3f} right")
    return picture(SMALL, parts, "Accuracy over confidence")


def best_of_chart(proxy: Sequence[Point], gold: Sequence[Point]) -> Markup:
    """Proxy and truth over KL, each scaled to its gain, so that both fit one picture."""
    values = [value for _, value in (*proxy, *gold)]
    x = SMALL.x(0.0, max([0.1, *(step for step, _ in proxy)]))
    y = SMALL.y(min(values), max([*values, min(values) + 1e-6]))
    parts = grid(SMALL, x, y)
    for number, points in enumerate((proxy, gold)):
        parts += [path(points, x, y, f"line c{number}")]
        parts += dots(points, x, y, number, "KL {:.2f}: {:.3f}")
    return picture(SMALL, parts, "The best of n over its KL bound")
