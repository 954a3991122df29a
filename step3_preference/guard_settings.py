"""What of a run that learns from preferences is watched, evaluation by evaluation.

What each signal means and what to do about it: docs/guards.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pipeline.guards.settings import Action, Guard, acting, words

Signal = Literal["kl", "kl_per_token", "chosen_nll", "response_length", "stop_rate", "repetition"]

OF_ANSWERS: tuple[str, ...] = ("kl", "kl_per_token", "response_length", "stop_rate", "repetition")
"""Signals of what the actor writes; the other one is of held-out rows."""

USUAL: tuple[tuple[Signal, float, int], ...] = (
    ("kl_per_token", 0.5, 1),
    ("chosen_nll", 0.5, 1),
    ("response_length", 0.5, 2),
    ("response_length", 3.0, 2),
    ("stop_rate", 0.05, 1),
    ("repetition", 0.3, 2),
)
"""Signal, limit and window of the guards that every run has; those it can't measure do nothing."""

STRICT = [(signal, limit, max(2, window)) for signal, limit, window in USUAL]
"""The same where they act: one evaluation is no reason to go back."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Guard):
    """One signal, and what becomes of the run where it is beyond its limit."""

    RELATIVE = ("response_length",)
    WORDS: ClassVar[Mapping[str, Sequence[Mapping[str, Any]]]] = {
        **words(USUAL),
        "strict": words(STRICT)["strict"],
    }
    """What a word in place of a list of guards stands for."""

    signal: Signal

    limit: float
    """kl: nats per sampled answer; kl_per_token: nats per token; chosen_nll: nats per token by
    which held-out chosen responses have become less likely since the start; response_length: of
    that of the start, below 1 a lower bound; stop_rate: loss since the start; repetition: share."""

    window: int = 2
    """Evaluations in a row that must be beyond the limit."""

    action: Action = "warn"
    """warn logs a sentence; stop ends the run with the last healthy actor; rollback goes back to
    the last healthy checkpoint and goes on with half the learning rate, at most twice; none does
    not look."""


WARNING = tuple(GuardConfig(**each) for each in GuardConfig.WORDS["warn"])

KNOWN = (
    *WARNING,
    *(replace(GuardConfig(**each), action="warn") for each in GuardConfig.WORDS["strict"]),
)
"""The usual guards under either word, as ones that warn."""


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """What is watched while a run goes on."""

    guards: tuple[GuardConfig, ...] = WARNING
    """A list of signal, limit, window and action, laid over the usual guards, which warn; strict
    rolls back, none is off (docs/guards.md). They look at evaluations. What stops or rolls back
    needs save_every in steps."""

    @property
    def acting_guards(self) -> tuple[GuardConfig, ...]:
        """The guards that may end the run or take it back."""
        return acting(self.guards)
