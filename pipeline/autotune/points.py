"""What trials gave, kept in a file: a line each, written as soon as a trial has ended."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.autotune.space import Value

Outcome = Literal["measured", "out of memory", "killed", "too slow", "refused", "failed"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One trial."""

    step: str
    """The step that was tried: `step1_sft`."""

    key: str
    """Stands for all that the trials of one tuning have in common: settings, processes, machine."""

    settings: Mapping[str, Value]
    """The candidate, by the names of the dimensions."""

    outcome: Outcome
    """`refused`: the settings don't go together; `killed`: by SIGKILL, as when the machine has no
    memory left; `too slow`: not over within the time that a trial has."""

    tokens_per_second: tuple[float, ...] = ()
    """Of each measured optimizer step, over all processes."""

    memory_gb: float | None = None
    """Memory of the process that held most, in GB; None where it was not measured."""

    seconds: float = 0.0
    """Seconds that the trial took, with its start."""

    message: str = ""
    """The last line it wrote, where it measured nothing."""

    @property
    def speed(self) -> float | None:
        """Tokens per second, the median over the measured steps; None where nothing was measured.

        All trials train on the same rows, so this ranks them as the seconds of a step do.
        """
        return statistics.median(self.tokens_per_second) if self.outcome == "measured" else None

    @property
    def spread(self) -> float:
        """Standard deviation of a single step's speed, as a share of it; 0 for less than two."""
        if len(self.tokens_per_second) < 2:
            return 0.0
        return statistics.stdev(self.tokens_per_second) / statistics.mean(self.tokens_per_second)


def best_of(points: Iterable[Point]) -> Point | None:
    """The fastest one; None where none was measured."""
    return max(
        (point for point in points if point.speed is not None),
        key=lambda point: point.speed or 0.0,
        default=None,
    )


def read_points(file: Path, *, step: str, key: str) -> list[Point]:
    """The trials of one tuning, in the order in which they were made.

    Those of other tunings are passed over, and a last line that was cut off.
    """
    points: list[Point] = []
    for record in _records(file):
        if (record.get("step"), record.get("key")) == (step, key):
            rates = tuple(record.pop("tokens_per_second"))
            if "said" in record:  # as version 0.1 began to write it
                record["message"] = record.pop("said")
            points.append(Point(**record, tokens_per_second=rates))
    return points


def add_point(file: Path, point: Point) -> None:
    """Write one more line, in one piece, after whatever whole lines there are."""
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(point)).encode() + b"\n"
    with file.open("ab+", buffering=0) as stream:
        if stream.tell() and _last_byte(file) != b"\n":
            line = b"\n" + line
        stream.write(line)


def _last_byte(file: Path) -> bytes:
    with file.open("rb") as stream:
        stream.seek(-1, 2)
        return stream.read()


def _records(file: Path) -> Sequence[dict[str, Any]]:
    if not file.exists():
        return []
    records: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:  # of a tuning that was killed while it wrote
            continue
    return records
