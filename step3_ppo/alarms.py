"""One sentence where training goes wrong, while it can still be stopped.

Each alarm is raised once, and again only after its metric has been in order for some iterations.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_KL = 0.25
"""Nats per response token from the reference; runs that learn stay near 0.1."""

MAX_RATIO = 20.0
"""Of new to old policy at any token of an iteration; runs that learn stay below 5."""

MIN_ENTROPY, MAX_ENTROPY = 0.1, 3.0
"""Entropy per token over that of the first rollout: below is collapse, above is noise."""

MIN_LENGTH, MAX_LENGTH = 0.5, 2.0
"""Mean response length over that of the first rollout."""

STOP_RATE_LOSS = 0.2
"""Share of responses that ended in the first rollout and no longer do."""

LIMITS = {"ended_by_turns": "ppo.max_turns", "ended_by_tokens": "ppo.max_new_tokens"}
"""Of an episode, by the metric of the share that each ended."""

QUIET = 5
"""Iterations in order after which an alarm may be raised again: metrics hover about a limit."""

CHANCE = 0.55
"""Held-out accuracy of a reward model at which a policy has nothing to climb."""


@dataclass
class Alarms:
    """What has been logged so far, and what the first rollout looked like."""

    first: dict[str, float] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)
    """The last iteration in which each metric was out of order."""

    scores_ends: bool = True
    """Whether `ppo.missing_eos_score` bounds what responses without an end count."""

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Log a sentence for each metric of iteration `step` that is newly out of order."""
        if not self.first:
            names = ("entropy", "response_length", "stop_rate")
            self.first = {name: metrics[name] for name in names}
        found = self._found(metrics)
        new = [found[name] for name in found if step - self.raised.get(name, -QUIET) > QUIET]
        self.raised |= dict.fromkeys(found, step)
        for sentence in new:
            logger.warning("iteration %d: %s", step, sentence)
        return new

    def state_dict(self) -> dict[str, Any]:
        """What a new start goes on with."""
        return {"first": self.first, "raised": self.raised}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another stood."""
        self.first, self.raised = dict(state["first"]), dict(state["raised"])

    def _found(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """A sentence for each metric that is out of order."""
        length, entropy = metrics["response_length"], metrics["entropy"]
        kl = metrics["kl"] / length
        first = self.first
        ended = first["stop_rate"] - metrics["stop_rate"]
        checks = {
            "kl": (
                kl > MAX_KL,
                f"the actor is {kl:.2f} nats a token from the reference, beyond {MAX_KL}: its"
                " answers may please what rewards them alone; raise ppo.kl_coef or lower"
                " ppo.actor.optim.lr",
            ),
            "ratio": (
                metrics["ratio_max"] > MAX_RATIO,
                f"updates made a token {metrics['ratio_max']:.0f} times as likely, beyond"
                f" {MAX_RATIO:.0f} times: they go too far; lower ppo.actor.optim.lr, ppo.ppo_epochs"
                " or ppo.target_kl",
            ),
            "entropy": (
                not MIN_ENTROPY <= _share(entropy, first["entropy"]) <= MAX_ENTROPY,
                f"entropy went from {first['entropy']:.3g} to {entropy:.3g} nats a token: answers"
                f" {'all become alike' if entropy < first['entropy'] else 'become noise'}; lower"
                " ppo.actor.optim.lr or raise ppo.kl_coef",
            ),
            "length": (
                not MIN_LENGTH <= _share(length, first["response_length"]) <= MAX_LENGTH,
                f"answers went from {first['response_length']:.0f} to {length:.0f} tokens: the"
                " reward may favour their length; read the samples, or raise ppo.kl_coef",
            ),
            "stop rate": (
                ended > STOP_RATE_LOSS,
                f"{100 * metrics['stop_rate']:.0f} % of answers end by themselves, against"
                f" {100 * first['stop_rate']:.0f} % at first: {self._remedy(metrics)}",
            ),
        }
        return {name: sentence for name, (wrong, sentence) in checks.items() if wrong}

    def _remedy(self, metrics: Mapping[str, float]) -> str:
        """What lets responses end by themselves; of episodes by what ended them instead."""
        ended = {name: metrics[metric] for metric, name in LIMITS.items() if metric in metrics}
        reached = sorted((name for name in ended if ended[name] > 0), key=lambda name: -ended[name])
        if ended and not reached:
            return "the environment failed in the others; see reward_failures"
        score = ", or lower ppo.missing_eos_score" if self.scores_ends else ""
        return f"raise {' or '.join(reached) or 'ppo.max_new_tokens'}{score}"


def _share(value: float, of: float) -> float:
    return value / of if of > 0 else 1.0


def check_reward_model(path: str | None) -> None:
    """Warn where step 2's result beside the reward model says that it is near chance."""
    result = _result(path)
    accuracy, pairs = result.get("accuracy_after"), result.get("pairs")
    if not isinstance(accuracy, int | float):
        return
    count = float(pairs) if isinstance(pairs, int | float) else 0.0
    # Two standard errors of guessing; few pairs can't tell a weak model from none.
    chance = max(CHANCE, 0.5 + 1 / math.sqrt(count)) if count > 0 else CHANCE
    if accuracy < chance:
        logger.warning(
            "the reward model orders %.1f %%%s held-out pairs right, where guessing gives 50 %%:"
            " there is next to nothing to climb; train step 2 on more pairs first",
            100 * accuracy,
            f" of {count:.0f}" if count > 0 else " of",
        )


def _result(path: str | None) -> Mapping[str, Any]:
    """The `eval` object that step 2 left in the reward model's directory; empty without one."""
    try:
        result = json.loads((Path(path or "") / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = result.get("eval") if isinstance(result, dict) else None
    return found if isinstance(found, dict) else {}
