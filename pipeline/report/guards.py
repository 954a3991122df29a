"""What the guards of a run saw and did, and the run without what they undid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.report.results import StepResult, finite, mapping

Line = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class GuardEvent:
    """A guard that spoke up."""

    step: int
    action: str
    """warn, rollback or stop."""

    sentence: str

    to: int | None
    """The step that the run went back to."""

    unit: str = "iteration"
    """What the run's steps are called."""

    @property
    def words(self) -> str:
        """What was done."""
        at = f"{self.unit} {self.to}" if self.to else "the start"
        if self.action == "stop":
            return f"ended with {at}"
        return f"back to {at}" if self.action == "rollback" else "warned"


def events_of(step: StepResult) -> list[GuardEvent]:
    """The events of the guards, in the order in which they came."""
    return [event for line in step.events if (event := event_of(line)) is not None]


def without_undone(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """(the lines of the course that the run ended on, the lines of guards).

    Of a run that went back to an iteration what it had logged of later ones is left out.
    """
    kept: list[Line] = []
    events: list[Line] = []
    for line in lines:
        guard = mapping(line.get("guard"))
        if not guard:
            kept.append(line)
            continue
        events.append(line)
        to = finite(guard.get("to"))
        if to is not None:
            kept = [each for each in kept if (finite(each.get("step")) or 0.0) <= to]
    return kept, events


def sentence_of(step: StepResult) -> str:
    """How guards changed the run, where they did; else empty."""
    acted = [event for event in events_of(step) if event.to is not None]
    if not acted:
        return ""
    last = acted[-1]
    at = f"{last.unit} {last.to}" if last.to else "its start"
    if last.action == "stop":
        return (
            f"A guard ended {step.name} after {last.unit} {last.step}, with the actor of {at}:"
            f" {last.sentence}"
        )
    times = "back" if len(acted) == 1 else f"back {len(acted)} times, at last"
    return f"A guard took {step.name} {times} from {last.unit} {last.step} to {at}: {last.sentence}"


def event_of(line: Line) -> GuardEvent | None:
    """The guard that spoke up in a line of metrics.jsonl, if one did."""
    guard = mapping(line.get("guard"))
    if not guard:
        return None
    to = finite(guard.get("to"))
    return GuardEvent(
        step=int(finite(guard.get("step")) or 0),
        action=str(guard.get("action", "")),
        sentence=str(guard.get("sentence", "")),
        to=None if to is None else int(to),
        unit=str(guard.get("unit", "iteration")),
    )
