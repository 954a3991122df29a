"""Signals of step 3, and the actions taken when they exceed their limits.

See docs/guards.md for the meaning of each signal and what to do about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pipeline.guards.settings import Action, Guard, guard_presets

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

DEFAULT_LIMITS: tuple[tuple[Signal, float, int], ...] = (
    ("kl_per_token", 0.25, 1),
    ("ratio_max", 20.0, 1),
    ("entropy", 0.2, 3),
    ("entropy", 3.0, 3),
    ("response_length", 0.5, 3),
    ("response_length", 3.0, 3),
    ("stop_rate", 0.2, 3),
    ("repetition", 0.3, 3),
    ("explained_variance", 0.0, 5),
    ("divergence", 2.0, 10),
)
"""Signal, limit and window of the default guards; unmeasured signals are ignored."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Guard):
    """A signal, its limit, and the action taken when the limit is exceeded."""

    RELATIVE = ("entropy", "response_length")
    LOWER = ("explained_variance",)
    TRENDS = ("divergence",)
    PRESETS: ClassVar[Mapping[str, Sequence[Mapping[str, Any]]]] = guard_presets(DEFAULT_LIMITS)
    """Lists of guards, by keyword."""

    signal: Signal

    limit: float
    """kl: nats per response; kl_per_token, rollout_gap: nats per token; ratio_max: the ratio;
    entropy, response_length: ratio to the first rollout (a limit below 1 is a lower bound);
    stop_rate: decrease since the first rollout; repetition, dead_groups, reward_failures: fraction;
    skipped: optimizer steps per update; explained_variance: a lower bound; divergence: standard
    errors by which the training reward rises while ppo.gold falls."""

    window: int = 3
    """Consecutive iterations that must be beyond the limit; for divergence, iterations of the trend
    (fewer early in a run, but at least 3). A rollback clears the window."""

    action: Action = "warn"
    """warn logs a message; stop ends the run with the last healthy actor; rollback returns to the
    last healthy checkpoint and continues with half the learning rate and twice kl_coef, at most
    twice; none disables the guard."""


DEFAULT_GUARDS = tuple(GuardConfig(**settings) for settings in GuardConfig.PRESETS["warn"])


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Signals that are watched during a run."""

    guards: tuple[GuardConfig, ...] = DEFAULT_GUARDS
    """Changes to the default guards, which warn: a list of signal, limit, window and action, or the
    keyword strict, which rolls back, or none, which disables all (docs/guards.md). Guards that stop
    or roll back require save_every to be a number of iterations."""

    @property
    def acting_guards(self) -> tuple[GuardConfig, ...]:
        """The guards that may end the run or roll it back."""
        return tuple(guard for guard in self.guards if guard.can_act)


def unmeasured_signals(
    *, gold: bool, critic: bool, reference: bool, groups: bool, sources: bool
) -> dict[str, str]:
    """Return the signals that a run does not measure, each with its requirement."""
    needs_reference = (reference, "a reference; set ppo.reference.path, or use a KL penalty")
    needs = {
        "kl": needs_reference,
        "kl_per_token": needs_reference,
        "divergence": (gold, "ppo.gold, a source that is not trained on"),
        "explained_variance": (critic, "a critic, which this method lacks"),
        "dead_groups": (groups, "a ppo.group_size of 2 or more"),
        "reward_failures": (sources or gold, "sources in ppo.rewards"),
    }
    return {signal: requirement for signal, (is_met, requirement) in needs.items() if not is_met}
