"""Settings of a guard: a signal, its limit, and the action if the signal is beyond it.

Each step defines a subclass with its signals, and a list of default guards (docs/guards.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from pipeline.config import SaveInterval
from pipeline.system.errors import require

Action = Literal["none", "warn", "stop", "rollback"]

MIN_TREND_CHECKS = 3
"""Minimum number of checks for a trend."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """One signal, its limit, and the action if the signal is beyond it."""

    RELATIVE: ClassVar[tuple[str, ...]] = ()
    """Signals relative to their initial value: limits below 1 are lower bounds, others upper."""

    LOWER: ClassVar[tuple[str, ...]] = ()
    """Signals whose limit is a lower bound; all others have upper bounds."""

    TRENDS: ClassVar[tuple[str, ...]] = ()
    """Signals that are trends over the window, with limits in standard errors."""

    signal: str
    limit: float
    window: int = 3
    action: Action = "warn"

    def __post_init__(self) -> None:
        setting = f"guards.{self.signal}"
        is_trend = self.signal in self.TRENDS
        least = MIN_TREND_CHECKS if is_trend else 1
        require(math.isfinite(self.limit), f"{setting}.limit must be finite, got {self.limit}")
        require(
            self.window >= least, f"{setting}.window must be at least {least}, got {self.window}"
        )
        require(
            self.limit > 0 or (self.signal not in self.RELATIVE and not is_trend),
            f"{setting}.limit must be positive, got {self.limit}",
        )

    def __str__(self) -> str:
        """Format the guard as in --help: `entropy<0.2`."""
        return f"{self.signal}{'<' if self.is_lower else '>'}{self.limit:g}"

    @property
    def is_lower(self) -> bool:
        """Whether the limit is a lower bound."""
        return self.signal in self.LOWER or (self.signal in self.RELATIVE and self.limit < 1)

    @property
    def can_act(self) -> bool:
        """Whether the guard may stop the run or roll it back."""
        return self.action in ("stop", "rollback")


GuardT = TypeVar("GuardT", bound=Guard)


def guard_presets(defaults: Sequence[tuple[str, float, int]]) -> dict[str, list[dict[str, Any]]]:
    """Build the guards of `warn`, `strict` and `none` from signals, limits and windows.

    With `strict`, guards with a window of one check only warn.
    """
    presets = {"warn": ("warn", "warn"), "strict": ("warn", "rollback"), "none": ("none", "none")}
    return {
        keyword: [
            {"signal": signal, "limit": limit, "window": window, "action": actions[window > 1]}
            for signal, limit, window in defaults
        ]
        for keyword, actions in presets.items()
    }


def with_defaults(guards: Sequence[GuardT], defaults: Sequence[GuardT]) -> tuple[GuardT, ...]:
    """Merge guards into the defaults; each replaces one with the same signal and kind of bound."""
    return tuple({(g.signal, g.is_lower): g for g in (*defaults, *guards)}.values())


def check_guards(
    guards: Sequence[Guard],
    defaults: Sequence[Guard],
    *,
    section: str,
    missing: Mapping[str, str],
    saves: SaveInterval | None,
    unit: str = "iterations",
) -> None:
    """Reject guards that can't work, except those of `defaults` whose signal is not measured.

    `missing` maps signals that this run does not measure to what each of them requires; `saves` is
    the interval between checkpoints, and `unit` the plural name of the training steps.

    Raises:
        ConfigError: a guard can't work; the message names the setting.
    """
    for guard in guards:
        is_default = replace(guard, action="warn") in defaults
        require(
            guard.signal not in missing or is_default or guard.action == "none",
            f"{section}.guards: {guard.signal} can't be measured without"
            f" {missing.get(guard.signal)}",
        )
        require(
            not guard.can_act or (saves is not None and saves.steps is not None),
            f"{section}.guards: {guard.signal} with action {guard.action} needs checkpoints that"
            f" don't depend on time; set save_every to a number of {unit}, such as 5",
        )
