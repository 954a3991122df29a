"""Watches a run by its metrics: warns, or decides that the run ends or goes back.

All that is looked at is the same on all processes, so that all decide alike.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from step3_ppo.guard_settings import FEWEST, Action, GuardConfig
from step3_ppo.guard_signals import OF_DIVERGENCE, OF_THE_START, diverges, is_beyond, sentence_of

logger = logging.getLogger(__name__)

QUIET = 5
"""Iterations in order after which a guard may warn again: metrics hover about a limit."""

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
    """Iterations over which it went wrong, `step` the last of them."""


@dataclass
class Guards:
    """What has been seen so far, and what the first rollout looked like."""

    guards: Sequence[GuardConfig]

    scores_ends: bool = True
    """Whether `ppo.missing_eos_score` bounds what responses without an end count."""

    first: dict[str, float] = field(default_factory=dict)

    step: int = 0
    """The iteration that was looked at last."""

    beyond: dict[str, int] = field(default_factory=dict)
    """By guard, the last iteration in which its signal was beyond the limit."""

    in_a_row: dict[str, int] = field(default_factory=dict)
    """By guard, for how many iterations it has been."""

    tripped: dict[str, int] = field(default_factory=dict)
    """By guard, the last iteration in which it was for the whole of its window."""

    history: list[dict[str, float]] = field(default_factory=list)
    """`OF_DIVERGENCE` of the last iterations."""

    acted: list[dict[str, Any]] = field(default_factory=list)
    """Of each time that the run went back: trip and `to`, the iteration after which it went on."""

    def look(self, step: int, metrics: Mapping[str, float]) -> list[Trip]:
        """The guards that have something new to say of iteration `step`, the gravest first.

        The first one alone is to be acted on.
        """
        self.first = self.first or {name: metrics[name] for name in OF_THE_START}
        self.step = step
        longest = max((each.window for each in self.guards), default=1)
        seen = {name: metrics[name] for name in OF_DIVERGENCE if name in metrics}
        self.history = [*self.history, seen][-longest:]
        trips = [trip for guard in self.guards if (trip := self._look(guard, metrics))]
        return sorted(trips, key=lambda trip: ("stop", "rollback", "warn").index(trip.action))

    def _look(self, guard: GuardConfig, metrics: Mapping[str, float]) -> Trip | None:
        """What the guard has to say, if it is out of order and has not said so just now."""
        name, step = str(guard), self.step
        if guard.action == "none" or not self._is_out_of_order(guard, metrics):
            return None
        before, self.tripped[name] = self.tripped.get(name, -QUIET), step
        if not guard.acts and step - before <= QUIET:
            return None
        sentence = sentence_of(
            guard,
            metrics,
            self.first,
            self.history[-guard.window :],
            scores_ends=self.scores_ends,
        )
        is_last = guard.action == "rollback" and len(self.acted) >= MAX_ROLLBACKS
        action = "stop" if is_last else guard.action
        return Trip(step, guard.signal, action, sentence, guard.window)

    def _is_out_of_order(self, guard: GuardConfig, metrics: Mapping[str, float]) -> bool:
        """Whether the signal has been beyond the limit for the whole window."""
        name = str(guard)
        if guard.signal == "divergence":
            window = self.history[-guard.window :]
            return len(window) >= FEWEST and diverges(window, errors=guard.limit)
        if not is_beyond(guard, metrics, self.first):
            self.in_a_row[name] = 0
            return False
        self.beyond[name] = self.step
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1
        return self.in_a_row[name] >= guard.window

    @property
    def is_healthy(self) -> bool:
        """Whether no guard that acts has had anything beyond its limit over its window."""
        return all(
            self.step - self.beyond.get(str(guard), -guard.window) >= guard.window
            for guard in self.guards
            if guard.acts
        )

    @property
    def window(self) -> int | None:
        """How many iterations a run may go back at least; None where it never does."""
        return max((guard.window for guard in self.guards if guard.acts), default=None)

    @property
    def rollbacks(self) -> int:
        """How often the run went back to learn more slowly."""
        return sum(each["action"] == "rollback" for each in self.acted)

    @property
    def stopped(self) -> bool:
        """Whether a guard has ended the run."""
        return any(each["action"] == "stop" for each in self.acted)

    def after(self, trip: Trip, *, to: int) -> dict[str, Any]:
        """The state of a run that `trip` has taken back to iteration `to`: its windows are new."""
        acted = [*self.acted, {**asdict(trip), "to": to}]
        return {**Guards(self.guards, step=to, first=self.first, acted=acted).state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """What a new start goes on with."""
        state = asdict(self)
        del state["guards"], state["scores_ends"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another stood."""
        for name, value in state.items():
            setattr(self, name, value)
