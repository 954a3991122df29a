"""What becomes of a run whose guards have tripped."""

import logging
from collections.abc import Mapping
from dataclasses import asdict

from pipeline.errors import CheckpointError, DivergedError
from pipeline.run import Run
from step3_ppo.guards import MAX_ROLLBACKS, Trip
from step3_ppo.setup import Setup, slow_down

logger = logging.getLogger(__name__)


def guard(ppo: Setup, run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """After iteration `step` say what is out of order, and go back where a guard wants that.

    Raises:
        DivergedError: it wants to, and no healthy checkpoint can be read.
    """
    trips = ppo.guards.look(step, metrics)
    for trip in trips:
        if trip.action == "warn":
            logger.warning("iteration %d: %s", step, trip.sentence)
            run.note(step, "guard", asdict(trip))
    if trips and trips[0].action != "warn":
        go_back(ppo, run, trips[0])


def go_back(ppo: Setup, run: Run, trip: Trip) -> None:
    """Take up the newest healthy state from before the trip's window: to go on, or to end with.

    What the run had come to since stays in metrics.jsonl, and the report leaves it out of curves.

    Raises:
        DivergedError: no such state can be read.
    """
    checkpoints, guards = ppo.checkpoints, ppo.guards
    try:
        checkpoint = checkpoints.newest_healthy(up_to=max(0, trip.step - trip.window))
    except CheckpointError as error:
        raise DivergedError(f"{trip.sentence}; and {error}") from error
    run.note(trip.step, "guard", {**asdict(trip), "to": checkpoint.step})
    checkpoints.go_back(checkpoint, {"guards": guards.after(trip, to=checkpoint.step)})
    slow_down(ppo)
    logger.warning("iteration %d: %s; %s", trip.step, trip.sentence, _what_follows(ppo, trip))


def _what_follows(ppo: Setup, trip: Trip) -> str:
    at = f"iteration {ppo.checkpoints.done}" if ppo.checkpoints.done else "the start"
    if trip.action == "stop":
        return f"the run ends with the actor of {at}"
    return (
        f"the run goes back to {at}, with half the learning rate and twice kl_coef (rollback"
        f" {ppo.guards.rollbacks} of {MAX_ROLLBACKS} at most)"
    )
