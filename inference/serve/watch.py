"""A run in progress, read from its files: the report's curves, alarms and samples."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.report.charts import step_charts
from pipeline.report.results import read_results
from pipeline.system.errors import DataError

FILES = ("metrics.jsonl", "diverged.json", "result.json", "samples.json")
MOST_SAMPLES = 8
MOST_EVENTS = 20
STALLED = 3
"""Multiple of the mean time between lines after which a step is reported as silent."""

LEAST_SECONDS = 30.0
"""Seconds after a line within which no step is silent."""


class WatchedRun:
    """The steps of an output directory; thread-safe."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def view(self, step: str, version: str) -> dict[str, Any]:
        """Return the data that the page shows of a step; little if the page's version is current.

        Args:
            step: name of its directory; empty for the one that was written last.
            version: `version` of the page's last view.
        """
        names = sorted(path.parent.name for path in self.out.glob("*/metrics.jsonl"))
        if not names:
            return {"unchanged": True, "notice": f"{self.out} has no step yet"}
        stamps = [_stamp(self.out / name / file) for name in names for file in FILES]
        now = f"{hash(tuple(stamps)):x}"
        if now == version:
            return {"unchanged": True, "notice": self._notice(step)}
        try:
            view = self._read(step)
        except (DataError, OSError, KeyError, TypeError) as error:  # the file is being written
            return {"unchanged": True, "notice": f"{self.out} can't be read: {error}"}
        return view | {"version": now, "notice": self._notice(view["step"])}

    def _read(self, step: str) -> dict[str, Any]:
        results = read_results(self.out)
        newest = max(results.steps, key=lambda name: (_stamp(self.out / name / FILES[0]), name))
        chosen = step if step in results.steps else newest
        events = [
            f"{event.unit} {event.step}, {event.words}: {event.sentence}"
            for event in results.steps[chosen].events
        ]
        diverged = [step.diverged for step in results.steps.values() if step.diverged]
        return {
            "step": chosen,
            "steps": [{"name": name, "state": step.state} for name, step in results.steps.items()],
            "charts": [asdict(drawn) for drawn in step_charts(results.steps[chosen])],
            "alarms": [*diverged, *events[-MOST_EVENTS:]],
            "samples": [
                {
                    "prompt": "\n\n".join(str(turn["content"]) for turn in sample["prompt"]),
                    "answers": {
                        name: str(answer.get("text", ""))
                        for name, answer in sample["answers"].items()
                    },
                }
                for sample in results.samples[:MOST_SAMPLES]
            ],
        }

    def _notice(self, name: str) -> str:
        """A notice if an unfinished step has not written for long; empty otherwise."""
        directory = self.out / name
        begun, written = _stamp(directory / "config.yaml")[0], _stamp(directory / FILES[0])[0]
        if not (name and begun and written) or (directory / "result.json").exists():
            return ""
        seconds = (written - begun) / max(1, (directory / FILES[0]).read_bytes().count(b"\n"))
        quiet = time.time() - written
        if quiet < max(STALLED * seconds, LEAST_SECONDS):
            return ""
        return (
            f"{name} has written nothing for {quiet:.0f} seconds; a line took {seconds:.1f} before"
        )


def _stamp(path: Path) -> tuple[float, int]:
    """Modification time and size of a file; zeros if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return 0.0, 0
    return status.st_mtime, status.st_size
