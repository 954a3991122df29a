"""Watches a run by its metrics: warns, or decides that the run ends or goes back.

All that is checked is the same on all processes, so that all decide alike.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pipeline.guards.settings import FEWEST, Action, Guard
from pipeline.guards.signals import Signals

QUIET = 5
"""Looks in order after which a guard may warn again: metrics hover about a limit."""

MAX_ROLLBACKS = 2
"""After these a guard that would roll back ends the run."""


@dataclass(frozen=True)
class Trip:
    """A guard whose signal is out of order, and what is to be done."""

    step: int
    signal: str
    action: Action
    sentence: str

    window: int
    """Steps over which it went wrong, `step` the last of them."""

    unit: str
    """What the run's steps are called."""


@dataclass
class Guards:
    """Checks a run's metrics, and remembers what the run was at first and what has tripped."""

    guards: Sequence[Guard]
    signals: Signals

    interval: int = 1
    """Steps from one check to the next."""

    first: dict[str, float] = field(default_factory=dict)
    """Metrics of the first check, unless they are given: those of `signals.OF_THE_START`."""

    step: int = 0
    """The step of the last check."""

    beyond: dict[str, int] = field(default_factory=dict)
    """By guard, the step of the last check at which its signal was beyond the limit."""

    in_a_row: dict[str, int] = field(default_factory=dict)
    """By guard, for how many checks in a row it has been beyond the limit."""

    tripped: dict[str, int] = field(default_factory=dict)
    """By guard, the step of the last check at which it had been so for the whole of its window."""

    history: list[dict[str, float]] = field(default_factory=list)
    """Metrics of the last checks: those of `signals.OF_TRENDS`."""

    acted: list[dict[str, Any]] = field(default_factory=list)
    """Of each time that the run went back: trip and `to`, the step after which it went on."""

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Trip]:
        """The guards that have something new to say of the run after `step`, the gravest first.

        The first one alone is to be acted on.
        """
        self.first = self.first or {name: metrics[name] for name in self.signals.OF_THE_START}
        self.step = step
        longest = max((each.window for each in self.guards), default=1)
        seen = {name: metrics[name] for name in self.signals.OF_TRENDS if name in metrics}
        self.history = [*self.history, seen][-longest:]
        trips = [trip for guard in self.guards if (trip := self._check(guard, metrics))]
        return sorted(trips, key=lambda trip: ("stop", "rollback", "warn").index(trip.action))

    def _check(self, guard: Guard, metrics: Mapping[str, float]) -> Trip | None:
        """What the guard has to say, if it is out of order and has not said so just now."""
        name, step = str(guard), self.step
        if guard.action == "none" or not self._is_out_of_order(guard, metrics):
            return None
        quiet = QUIET * self.interval
        before, self.tripped[name] = self.tripped.get(name, -quiet), step
        if not guard.acts and step - before <= quiet:
            return None
        sentence = self.signals.sentence_of(
            guard, metrics, self.first, self.history[-guard.window :]
        )
        is_last = guard.action == "rollback" and len(self.acted) >= MAX_ROLLBACKS
        action = "stop" if is_last else guard.action
        return Trip(step, guard.signal, action, sentence, self._steps(guard), self.signals.UNIT)

    def _is_out_of_order(self, guard: Guard, metrics: Mapping[str, float]) -> bool:
        """Whether the signal has been beyond the limit for the whole window."""
        name = str(guard)
        if guard.signal in guard.TRENDS:
            window = self.history[-guard.window :]
            return len(window) >= FEWEST and self.signals.shows_trend(guard, window)
        value = self.signals.value_of(guard.signal, metrics, self.first)
        if value is None or not (value < guard.limit if guard.is_lower else value > guard.limit):
            self.in_a_row[name] = 0
            return False
        self.beyond[name] = self.step
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1
        return self.in_a_row[name] >= guard.window

    @property
    def is_healthy(self) -> bool:
        """Whether no guard that acts has had anything beyond its limit over its window."""
        return all(
            self.step - self.beyond.get(str(guard), -self._steps(guard)) >= self._steps(guard)
            for guard in self.guards
            if guard.acts
        )

    @property
    def window(self) -> int | None:
        """The fewest steps by which a run may go back; None where it never does."""
        return max((self._steps(guard) for guard in self.guards if guard.acts), default=None)

    def _steps(self, guard: Guard) -> int:
        return guard.window * self.interval

    @property
    def rollbacks(self) -> int:
        """How often the run went back to learn more slowly."""
        return sum(each["action"] == "rollback" for each in self.acted)

    @property
    def stopped(self) -> bool:
        """Whether a guard has ended the run."""
        return any(each["action"] == "stop" for each in self.acted)

    def after(self, trip: Trip, *, to: int) -> dict[str, Any]:
        """The state of a run that `trip` has taken back to step `to`: its windows are new."""
        acted = [*self.acted, {**asdict(trip), "to": to}]
        new = replace(self, step=to, beyond={}, in_a_row={}, tripped={}, history=[], acted=acted)
        return new.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """What a new start goes on with."""
        names = {each.name for each in fields(self)} - {"guards", "signals", "interval"}
        return {name: copy.deepcopy(getattr(self, name)) for name in sorted(names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another stood."""
        for name, value in state.items():
            setattr(self, name, value)
