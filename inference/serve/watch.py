"""A run as it learns, from its files alone: what grew is read, whoever looks and however many.

`metrics.jsonl` grows by whole lines; a resumed run cuts it, and then it is read anew.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.report.charts import charts_of
from pipeline.report.results import GuardEvent, event_of, finite, mapping

POINTS = 400
"""Points of a drawn curve at most: more are not seen."""

MOST_LINES = 20_000
"""Of those that are new at once, evenly chosen where there are more: curves have fewer points."""

STALLED = 3
"""Step times without a new line after which a run is called stalled."""

MOST_SAMPLES = 8

MOST_EVENTS = 20
"""Sentences of guards that are shown, the newest ones."""

LEAST_SECONDS = 30.0
"""Seconds after a line within which no run is called stalled."""


class MetricsTail:
    """The lines of a growing `metrics.jsonl`, as series of (step, value) by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clear()

    def _clear(self) -> None:
        self._offset = 0
        self._rest = b""
        self._head = b""
        self.series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.events: list[GuardEvent] = []
        """Guards that spoke up."""
        self.count = 0
        """Lines so far."""

    @property
    def position(self) -> str:
        """The same for what was read to the same place of the same file."""
        return f"{self._offset} {hash(self._head)}"

    def read(self) -> None:
        """Take in what was written since; all of it where the file was cut or replaced."""
        try:
            with self.path.open("rb") as file:
                head = file.read(256)
                size = file.seek(0, 2)
                if size < self._offset or not head.startswith(self._head):
                    self._clear()
                self._head = self._head or head[: head.find(b"\n") + 1]
                file.seek(self._offset)
                new = file.read()
        except OSError:
            self._clear()
            return
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        stride = 1 + len(lines) // MOST_LINES
        for number, line in enumerate(lines):
            is_last = number == len(lines) - 1
            if number % stride == 0 or is_last or b'"eval_' in line or b'"guard"' in line:
                self._take(line)
        self.count += len(lines)

    def _take(self, line: bytes) -> None:
        try:
            metrics = mapping(json.loads(line))
        except ValueError:
            return
        step = finite(metrics.get("step"))
        event = event_of(metrics)
        if event is not None:
            self._note(event)
        elif step is not None:
            self._add(step, metrics)

    def _note(self, event: GuardEvent) -> None:
        """Record it, and forget what it undid."""
        self.events.append(event)
        if event.to is not None:
            for name, points in self.series.items():
                self.series[name] = [point for point in points if point[0] <= event.to]

    def _add(self, step: float, metrics: Mapping[str, object]) -> None:
        for name, value in metrics.items():
            number = finite(value)
            if number is not None:
                self.series[name].append((step, number))


class WatchedRun:
    """The steps of an output directory; from any thread."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._lock = threading.Lock()
        self._tails: dict[str, MetricsTail] = {}

    def view(self, step: str, version: str) -> dict[str, Any]:
        """What the page shows of a step, or of the newest one; little where nothing is new.

        Args:
            step: its directory's name; empty takes the one that was written last.
            version: of what the page has.
        """
        with self._lock:
            try:
                names = self._names()
            except OSError:
                names = []
            if not names:
                return {"unchanged": True, "notice": f"{self.out} has no step yet"}
            chosen = (
                step if step in names else max(names, key=lambda name: (self._written(name), name))
            )
            tail = self._tails.setdefault(chosen, MetricsTail(self.out / chosen / "metrics.jsonl"))
            tail.read()
            now = f"{chosen} {tail.position} {' '.join(map(self._state, names))}"
            if now == version:
                return {"unchanged": True, "notice": self._stall(chosen, tail)}
            return self._whole(chosen, tail, names) | {"version": now}

    def _names(self) -> list[str]:
        return sorted(path.parent.name for path in self.out.glob("*/metrics.jsonl"))

    def _written(self, name: str) -> float:
        try:
            return (self.out / name / "metrics.jsonl").stat().st_mtime
        except OSError:
            return 0.0

    def _whole(self, chosen: str, tail: MetricsTail, names: list[str]) -> dict[str, Any]:
        sentences = [
            str(read_object(self.out / name / "diverged.json").get("sentence", ""))
            for name in names
        ]
        return {
            "step": chosen,
            "steps": [{"name": name, "state": self._state(name)} for name in names],
            "charts": charts(tail.series),
            "alarms": [
                *(sentence for sentence in sentences if sentence),
                *(sentence_of(event) for event in tail.events[-MOST_EVENTS:]),
            ],
            "samples": samples(self.out / chosen / "samples.json"),
            "notice": self._stall(chosen, tail),
        }

    def _state(self, name: str) -> str:
        if (self.out / name / "diverged.json").exists():
            return "diverged"
        return "finished" if (self.out / name / "result.json").exists() else "not finished"

    def _stall(self, name: str, tail: MetricsTail) -> str:
        """A sentence where an unfinished step has written nothing for long."""
        if (self.out / name / "result.json").exists() or not tail.count:
            return ""
        begun = (self.out / name / "config.yaml").stat() if self._has_config(name) else None
        if begun is None:
            return ""
        written = self._written(name)
        each = (written - begun.st_mtime) / tail.count
        quiet = time.time() - written
        if quiet < max(STALLED * each, LEAST_SECONDS):
            return ""
        return f"{name} has written nothing for {quiet:.0f} seconds, a line took {each:.1f} before"

    def _has_config(self, name: str) -> bool:
        return (self.out / name / "config.yaml").exists()


def sentence_of(event: GuardEvent) -> str:
    """When a guard spoke up, what was done, and why."""
    return f"{event.unit} {event.step}, {event.words}: {event.sentence}"


def charts(series: Mapping[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """The report's charts of which there are two points or more."""
    drawn: list[dict[str, Any]] = []
    for chart in charts_of(series):
        curves = [
            {"name": title, "points": thinned(series[metric])}
            for metric, title in chart.names.items()
            if series.get(metric)
        ]
        if any(len(curve["points"]) > 1 for curve in curves):
            drawn.append(
                {
                    "title": chart.title,
                    "note": chart.note,
                    "logarithmic": chart.logarithmic,
                    "curves": curves,
                }
            )
    return drawn


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `POINTS` of them, evenly, the first and the last among them."""
    if len(points) <= POINTS:
        return points
    return [points[place * (len(points) - 1) // (POINTS - 1)] for place in range(POINTS)]


def samples(path: Path) -> list[dict[str, Any]]:
    """The first answers of each model to held-out prompts."""
    rows = read_object(path).get("rows", [])
    found: list[dict[str, Any]] = []
    for row in rows[:MOST_SAMPLES] if isinstance(rows, list) else []:
        prompt = "\n\n".join(str(turn["content"]) for turn in row["prompt"])
        answers = {name: str(answer.get("text", "")) for name, answer in row["answers"].items()}
        found.append({"prompt": prompt, "answers": answers})
    return found


def read_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; empty where there is none, or it is being written."""
    try:
        return mapping(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError):
        return {}
