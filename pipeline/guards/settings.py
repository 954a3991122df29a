"""Settings of a guard: a signal, its limit, and what becomes of a run that is beyond it.

Each step has a subclass with its own signals, and a list of usual guards (docs/guards.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from pipeline.config import SaveInterval
from pipeline.errors import require

Action = Literal["none", "warn", "stop", "rollback"]

FEWEST = 3
"""Looks that show a trend."""

Usual = Sequence[tuple[str, float, int]]
"""Signal, limit and window of the guards that every run of a step has."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """One signal, and what becomes of the run where it is beyond its limit."""

    RELATIVE: ClassVar[tuple[str, ...]] = ()
    """Counted in those of the start: a limit below 1 is a lower bound, one above 1 an upper."""

    LOWER: ClassVar[tuple[str, ...]] = ()
    """Whose limit is a lower bound; every other limit is an upper one."""

    TRENDS: ClassVar[tuple[str, ...]] = ()
    """Looked at over the whole window, whose limit counts standard errors."""

    signal: str
    limit: float
    window: int = 3
    action: Action = "warn"

    def __post_init__(self) -> None:
        where = f"guards.{self.signal}"
        is_trend = self.signal in self.TRENDS
        require(math.isfinite(self.limit), f"{where}.limit must be finite, got {self.limit}")
        least = FEWEST if is_trend else 1
        require(self.window >= least, f"{where}.window must be {least} or more, got {self.window}")
        require(
            self.signal not in self.RELATIVE or (self.limit > 0 and self.limit != 1),
            f"{where}.limit must be above 0 and not 1, got {self.limit}: below 1 it is a lower"
            " bound, above 1 an upper one",
        )
        require(
            not is_trend or self.limit > 0,
            f"{where}.limit must be above 0, got {self.limit}: it counts standard errors",
        )

    def __str__(self) -> str:
        """`entropy<0.2`, as --help shows the defaults."""
        return f"{self.signal}{'<' if self.is_lower else '>'}{self.limit:g}"

    @property
    def is_lower(self) -> bool:
        """Whether the limit is a lower bound."""
        return self.signal in self.LOWER or (self.signal in self.RELATIVE and self.limit < 1)

    @property
    def place(self) -> tuple[str, bool]:
        """What two guards have in common of which the later one counts."""
        return self.signal, self.is_lower

    @property
    def acts(self) -> bool:
        """Whether it may end the run or take it back."""
        return self.action in ("stop", "rollback")


G = TypeVar("G", bound=Guard)


def words(usual: Usual) -> dict[str, list[dict[str, Any]]]:
    """What `warn`, `strict` and `none` stand for in place of a list of guards.

    Under `strict` what a single check shows is a reason to warn at most.
    """
    actions = {"warn": ("warn", "warn"), "strict": ("warn", "rollback"), "none": ("none", "none")}
    return {
        word: [
            {"signal": signal, "limit": limit, "window": window, "action": action[window > 1]}
            for signal, limit, window in usual
        ]
        for word, action in actions.items()
    }


def completed(guards: Sequence[G], usual: Sequence[G]) -> tuple[G, ...]:
    """The guards that are given, in place of usual ones of their signal and side, and the others.

    Of a complete list it is the same list.
    """
    return tuple(({g.place: g for g in usual} | {g.place: g for g in guards}).values())


def acting(guards: Sequence[G]) -> tuple[G, ...]:
    """The guards that may end the run or take it back."""
    return tuple(guard for guard in guards if guard.acts)


def check_guards(
    guards: Sequence[Guard],
    usual: Sequence[Guard],
    *,
    section: str,
    lacking: Mapping[str, str],
    every: SaveInterval | None,
    unit: str = "iterations",
) -> None:
    """Refuse guards that can't do what they say.

    Args:
        guards: of the run.
        usual: those that do nothing where their signal is not measured.
        section: of the step's settings, for the message.
        lacking: of signals that this run does not measure, what they would need.
        every: when the state is saved.
        unit: what the step calls its steps, in the plural.

    Raises:
        ConfigError: one sentence that names the setting.
    """
    for guard in guards:
        is_usual = replace(guard, action="warn") in usual
        require(
            guard.signal not in lacking or is_usual or guard.action == "none",
            f"{section}.guards: {guard.signal} can't be measured without"
            f" {lacking.get(guard.signal)}",
        )
    for guard in acting(guards)[:1]:
        require(
            every is not None and every.steps is not None,
            f"{section}.guards: {guard.signal} with action {guard.action} goes back to a checkpoint"
            f" that must not depend on the clock; set save_every to a number of {unit}, such as 5",
        )
