"""Guards that watch a run's metrics: they warn, stop the run, or roll it back.

The metrics are the same on all processes, so all make the same decision.
"""

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from pipeline.guards.settings import MIN_TREND_CHECKS, Action, Guard
from pipeline.run.checkpoints import Checkpoints
from pipeline.system.errors import CheckpointError, DivergedError

Metrics = Mapping[str, float]

COOLDOWN = 5
"""Number of checks within the limit before a guard may warn again, since metrics fluctuate."""

MAX_ROLLBACKS = 2
"""Maximum number of rollbacks; after that a guard stops the run instead."""

logger = logging.getLogger(__name__)


def significant_decrease(before: float, now: float, count: int) -> float:
    """Return the decrease of a fraction of `count` trials, or 0 if below two standard errors."""
    standard_error = ((now * (1 - now) + before * (1 - before)) / count) ** 0.5
    return before - now if before - now > 2 * standard_error else 0.0


class Signals(ABC):
    """The signals of a step: their values and messages."""

    INITIAL_METRICS: ClassVar[Sequence[str]]
    """Names of the metrics that are compared with their initial values."""

    TREND_METRICS: ClassVar[Sequence[str]] = ()
    """Names of the metrics whose trend over several checks is a signal."""

    UNIT: ClassVar[str]
    """Name of a training step in messages: `iteration` or `step`."""

    ROLLBACK_CHANGES: ClassVar[str]
    """Description of the changes that a rollback makes."""

    MESSAGES: ClassVar[Mapping[str, str]]
    """Messages by signal, with the problem and possible remedies: format strings with the metrics,
    `first` (the initial metrics), `limit`, `value` and `rate` as fields."""

    rate: str = "optim.lr"
    """Setting of the trained weights' learning rate: `optim.lr` or `lora.lr`."""

    @abstractmethod
    def compute_value(self, signal: str, metrics: Metrics, first: Metrics) -> float | None:
        """Return a signal's value in the unit of its limit, or None if it was not measured."""

    def has_trend(self, guard: Guard, history: Sequence[Metrics]) -> bool:
        """Return whether the trend signal is beyond its limit; most steps have no trend signals."""
        del guard, history
        return False

    def format_message(
        self, guard: Guard, metrics: Mapping[str, Any], first: Metrics, history: Sequence[Metrics]
    ) -> str:
        """Return a sentence on the problem and its fix, given the metrics of recent checks."""
        del history
        value = self.compute_value(guard.signal, metrics, first)
        numbers = {**metrics, "first": first, "limit": guard.limit, "value": value}
        numbers["rate"] = self.rate
        return self.MESSAGES[guard.signal].format_map(numbers)


@dataclass(frozen=True)
class Trip:
    """A guard whose signal is beyond its limit, and its action."""

    step: int
    signal: str
    action: Action
    sentence: str

    window: int
    """Number of steps over which the limit was exceeded; `step` is the last of them."""

    unit: str
    """Name of the run's steps."""


@dataclass
class Guards:
    """Checks a run's metrics, and records the initial metrics and past trips."""

    guards: Sequence[Guard]
    signals: Signals

    interval: int = 1
    """Steps from one check to the next."""

    first: dict[str, float] = field(default_factory=dict)
    """Values of the metrics in `signals.INITIAL_METRICS`: as given, or from the first check."""

    step: int = 0
    """The step of the last check."""

    beyond: dict[str, int] = field(default_factory=dict)
    """Step of the last check at which a guard's signal exceeded its limit, by guard."""

    in_a_row: dict[str, int] = field(default_factory=dict)
    """Number of consecutive checks beyond the limit, by guard."""

    tripped: dict[str, int] = field(default_factory=dict)
    """Step of the last check at which a guard had exceeded its limit for its window, by guard."""

    history: list[dict[str, float]] = field(default_factory=list)
    """Values of the metrics in `signals.TREND_METRICS` at the last checks, oldest first."""

    acted: list[dict[str, Any]] = field(default_factory=list)
    """One entry per rollback or stop: the trip, and `to`, the step to which the run returned."""

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Trip]:
        """Return the guards that trip after `step`, most severe first; only the first one acts."""
        self.first = self.first or {name: metrics[name] for name in self.signals.INITIAL_METRICS}
        self.step = step
        max_window = max((guard.window for guard in self.guards), default=1)
        measured = {name: metrics[name] for name in self.signals.TREND_METRICS if name in metrics}
        self.history = [*self.history, measured][-max_window:]
        trips = [trip for guard in self.guards if (trip := self._check(guard, metrics))]
        return sorted(trips, key=lambda trip: ("stop", "rollback", "warn").index(trip.action))

    def _check(self, guard: Guard, metrics: Mapping[str, float]) -> Trip | None:
        """Return the trip, or None if the guard is off, within its limit or in its cooldown."""
        name, step = str(guard), self.step
        if guard.action == "none" or not self._is_beyond_limit(guard, metrics):
            return None
        cooldown = COOLDOWN * self.interval
        before, self.tripped[name] = self.tripped.get(name, -cooldown), step
        if not guard.can_act and step - before <= cooldown:
            return None
        sentence = self.signals.format_message(
            guard, metrics, self.first, self.history[-guard.window :]
        )
        is_last = guard.action == "rollback" and len(self.acted) >= MAX_ROLLBACKS
        action = "stop" if is_last else guard.action
        return Trip(step, guard.signal, action, sentence, self._num_steps(guard), self.signals.UNIT)

    def _is_beyond_limit(self, guard: Guard, metrics: Mapping[str, float]) -> bool:
        """Return whether the signal was beyond the limit (or had a trend) over the whole window."""
        name = str(guard)
        if guard.signal in guard.TRENDS:
            window = self.history[-guard.window :]
            return len(window) >= MIN_TREND_CHECKS and self.signals.has_trend(guard, window)
        value = self.signals.compute_value(guard.signal, metrics, self.first)
        if value is None or not (value < guard.limit if guard.is_lower else value > guard.limit):
            self.in_a_row[name] = 0
            return False
        self.beyond[name] = self.step
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1
        return self.in_a_row[name] >= guard.window

    @property
    def is_healthy(self) -> bool:
        """Whether no guard that can act has been beyond its limit within its window."""
        return all(
            self.step - self.beyond.get(str(guard), -self._num_steps(guard))
            >= self._num_steps(guard)
            for guard in self.guards
            if guard.can_act
        )

    @property
    def window(self) -> int | None:
        """Minimum number of steps undone by a rollback; None if no guard can act."""
        return max((self._num_steps(guard) for guard in self.guards if guard.can_act), default=None)

    def _num_steps(self, guard: Guard) -> int:
        return guard.window * self.interval

    @property
    def rollbacks(self) -> int:
        """Number of rollbacks after which the run continued at a lower learning rate."""
        return sum(trip["action"] == "rollback" for trip in self.acted)

    @property
    def stopped(self) -> bool:
        """Whether a guard has stopped the run."""
        return any(trip["action"] == "stop" for trip in self.acted)

    def watch(
        self, checkpoints: Checkpoints, step: int, metrics: Metrics, slow_down: Callable[[], None]
    ) -> None:
        """Log signals beyond their limits after `step`; roll back if a guard acts.

        A rollback loads the newest healthy checkpoint from before the guard's window, and calls
        `slow_down`, which lowers the learning rate according to `rollbacks`. The metrics of undone
        steps stay in metrics.jsonl; the report omits them from curves.

        Raises:
            DivergedError: no healthy checkpoint can be read.
        """
        trips = self.check(step, metrics)
        for trip in trips:
            if trip.action == "warn":
                logger.warning("%s %d: %s", trip.unit, step, trip.sentence)
                checkpoints.run.log_event(step, "guard", asdict(trip))
        if not trips or trips[0].action == "warn":
            return
        trip = trips[0]
        try:
            checkpoint = checkpoints.newest_healthy(up_to=max(0, trip.step - trip.window))
        except CheckpointError as error:
            raise DivergedError(f"{trip.sentence}; and {error}") from error
        checkpoints.run.log_event(trip.step, "guard", {**asdict(trip), "to": checkpoint.step})
        checkpoints.roll_back(checkpoint, {"guards": self.state_after(trip, to=checkpoint.step)})
        slow_down()
        resumed_at = f"{trip.unit} {checkpoints.done}" if checkpoints.done else "the start"
        consequence = f"stopping with the actor from {resumed_at}"
        if trip.action != "stop":
            consequence = (
                f"rolling back to {resumed_at}, with {self.signals.ROLLBACK_CHANGES} (rollback"
                f" {self.rollbacks} of at most {MAX_ROLLBACKS})"
            )
        logger.warning("%s %d: %s; %s", trip.unit, trip.step, trip.sentence, consequence)

    def state_after(self, trip: Trip, *, to: int) -> dict[str, Any]:
        """Return the state, with empty windows, after `trip` rolls the run back to step `to`."""
        acted = [*self.acted, {**asdict(trip), "to": to}]
        guards = replace(self, step=to, beyond={}, in_a_row={}, tripped={}, history=[], acted=acted)
        return guards.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""
        names = {item.name for item in fields(self)} - {"guards", "signals", "interval"}
        return {name: copy.deepcopy(getattr(self, name)) for name in sorted(names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)
