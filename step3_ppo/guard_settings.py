"""Settings of the guards: what of a run is watched, and what becomes of a run that is out of order.

What each signal means and what to do about it: docs/guards.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipeline.errors import require

if TYPE_CHECKING:
    from step3_ppo.config import PPOConfig

Signal = Literal[
    "kl",
    "kl_per_token",
    "ratio_max",
    "entropy",
    "response_length",
    "stop_rate",
    "repetition",
    "divergence",
    "explained_variance",
    "skipped",
    "dead_groups",
    "reward_failures",
    "rollout_gap",
]

Action = Literal["none", "warn", "stop", "rollback"]

RELATIVE = ("entropy", "response_length")
"""Counted in those of the first rollout: a limit below 1 is a lower bound, one above 1 an upper."""

LOWER = ("explained_variance",)
"""Whose limit is a lower bound; every other limit is an upper one."""

USUAL: tuple[tuple[Signal, float, int], ...] = (
    ("kl_per_token", 0.25, 1),
    ("ratio_max", 20.0, 1),
    ("entropy", 0.2, 3),
    ("entropy", 3.0, 3),
    ("response_length", 0.5, 3),
    ("response_length", 3.0, 3),
    ("stop_rate", 0.2, 3),
    ("repetition", 0.3, 3),
    ("divergence", 2.0, 10),
)
"""Signal, limit and window of the guards that every run has; those it can't measure do nothing."""


FEWEST = 3
"""Iterations that show a trend."""


def _usual(action: Action) -> list[dict[str, Any]]:
    """The usual guards with that action; a single iteration is a reason to warn at most."""
    return [
        {
            "signal": signal,
            "limit": limit,
            "window": window,
            "action": "warn" if action == "rollback" and window == 1 else action,
        }
        for signal, limit, window in USUAL
    ]


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """One signal, and what becomes of the run where it is beyond its limit."""

    WORDS: ClassVar[Mapping[str, Sequence[Mapping[str, Any]]]] = {
        "warn": _usual("warn"),
        "strict": _usual("rollback"),
        "none": _usual("none"),
    }
    """What a word in place of a list of guards stands for."""

    signal: Signal

    limit: float
    """kl: nats per response; kl_per_token, rollout_gap: nats per token; ratio_max: times; entropy,
    response_length: of that of the first rollout, below 1 a lower bound; stop_rate: loss since the
    first rollout; repetition, dead_groups, reward_failures: share; skipped: optimizer steps of an
    update; explained_variance: lower bound; divergence: standard errors by which what is trained on
    rises while ppo.gold falls."""

    window: int = 3
    """Iterations in a row that must be beyond the limit; of divergence those over which both move,
    or fewer, but 3, where there are no more yet. A run that goes back leaves them all behind."""

    action: Action = "warn"
    """warn logs a sentence; stop ends the run with the last healthy actor; rollback goes back to
    the last healthy checkpoint and goes on with half the learning rate and twice kl_coef, at most
    twice; none does not look."""

    def __post_init__(self) -> None:
        where = f"guards.{self.signal}"
        require(math.isfinite(self.limit), f"{where}.limit must be finite, got {self.limit}")
        least = FEWEST if self.signal == "divergence" else 1
        require(self.window >= least, f"{where}.window must be {least} or more, got {self.window}")
        require(
            self.signal not in RELATIVE or (self.limit > 0 and self.limit != 1),
            f"{where}.limit must be above 0 and not 1, got {self.limit}: below 1 it is a lower"
            " bound, above 1 an upper one",
        )
        require(
            self.signal != "divergence" or self.limit > 0,
            f"{where}.limit must be above 0, got {self.limit}: it counts standard errors",
        )

    def __str__(self) -> str:
        """`entropy<0.2`, as --help shows the defaults."""
        return f"{self.signal}{'<' if self.is_lower else '>'}{self.limit:g}"

    @property
    def is_lower(self) -> bool:
        """Whether the limit is a lower bound."""
        return self.signal in LOWER or (self.signal in RELATIVE and self.limit < 1)

    @property
    def place(self) -> tuple[str, bool]:
        """Of two guards in the same place the later one counts."""
        return self.signal, self.is_lower

    @property
    def acts(self) -> bool:
        """Whether it may end the run or take it back."""
        return self.action in ("stop", "rollback")


WARNING = tuple(GuardConfig(**each) for each in GuardConfig.WORDS["warn"])


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """What is watched while a run goes on."""

    guards: tuple[GuardConfig, ...] = WARNING
    """What is watched: a list of signal, limit, window, action, over the usual guards; or warn,
    strict, none (docs/guards.md)."""

    @property
    def acting_guards(self) -> tuple[GuardConfig, ...]:
        """Those that may end the run or take it back."""
        return tuple(guard for guard in self.guards if guard.acts)


def completed(guards: Sequence[GuardConfig]) -> tuple[GuardConfig, ...]:
    """The guards that are given, in place of usual ones of their signal and side, and the others.

    Of a complete list it is the same list.
    """
    given = {guard.place: guard for guard in guards}
    usual = {guard.place: guard for guard in WARNING}
    return tuple((usual | given).values())


def check_guards(config: "PPOConfig") -> None:
    """Refuse guards that can't do what they say.

    Raises:
        ConfigError: one sentence that names the setting.
    """
    needs = {
        "divergence": (config.gold is not None, "ppo.gold, a source that is not trained on"),
        "explained_variance": (config.has_critic, "a critic, which this method has not"),
        "dead_groups": (config.group_size > 1, "ppo.group_size 2 or more"),
        "reward_failures": (
            bool(config.rewards) or config.gold is not None,
            "sources in ppo.rewards",
        ),
    }
    for guard in config.guards:
        is_there, what = needs.get(guard.signal, (True, ""))
        is_usual = replace(guard, action="warn") in WARNING
        require(
            is_there or is_usual or guard.action == "none",
            f"ppo.guards: {guard.signal} can't be measured without {what}",
        )
    every = config.save_interval
    for guard in config.acting_guards[:1]:
        require(
            every is not None and every.steps is not None,
            f"ppo.guards: {guard.signal} with action {guard.action} goes back to a checkpoint that"
            " must not depend on the clock; set save_every to a number of iterations, as 5",
        )
