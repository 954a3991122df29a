"""What becomes of a run whose guards have tripped."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from pipeline.checkpoints import Checkpoints
from pipeline.errors import CheckpointError, DivergedError
from pipeline.guards.guards import MAX_ROLLBACKS, Guards, Trip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Guarded:
    """A run that guards watch."""

    guards: Guards
    checkpoints: Checkpoints

    slow_down: Callable[[], None]
    """Has what was loaded learn as slowly as `guards.rollbacks` asks."""

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """After `step` say what is out of order, and go back where a guard wants that.

        Raises:
            DivergedError: it wants to, and no healthy checkpoint can be read.
        """
        trips = self.guards.check(step, metrics)
        for trip in trips:
            if trip.action == "warn":
                logger.warning("%s %d: %s", trip.unit, step, trip.sentence)
                self.checkpoints.run.note(step, "guard", asdict(trip))
        if trips and trips[0].action != "warn":
            self.go_back(trips[0])

    def go_back(self, trip: Trip) -> None:
        """Take up the newest healthy state from before the trip's window: to go on, or to end with.

        What the run had come to since stays in metrics.jsonl, and the report leaves it out of
        curves.

        Raises:
            DivergedError: no such state can be read.
        """
        checkpoints, guards = self.checkpoints, self.guards
        try:
            checkpoint = checkpoints.newest_healthy(up_to=max(0, trip.step - trip.window))
        except CheckpointError as error:
            raise DivergedError(f"{trip.sentence}; and {error}") from error
        checkpoints.run.note(trip.step, "guard", {**asdict(trip), "to": checkpoint.step})
        checkpoints.go_back(checkpoint, {"guards": guards.after(trip, to=checkpoint.step)})
        self.slow_down()
        follows = self._what_follows(trip)
        logger.warning("%s %d: %s; %s", trip.unit, trip.step, trip.sentence, follows)

    def _what_follows(self, trip: Trip) -> str:
        done = self.checkpoints.done
        at = f"{trip.unit} {done}" if done else "the start"
        if trip.action == "stop":
            return f"the run ends with the actor of {at}"
        return (
            f"the run goes back to {at}, with {self.guards.signals.SLOWER} (rollback"
            f" {self.guards.rollbacks} of {MAX_ROLLBACKS} at most)"
        )
