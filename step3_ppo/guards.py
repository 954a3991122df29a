"""Values and messages of the guards' signals for an iteration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.statistics import fitted_change, slope_in_errors
from pipeline.guards.guards import Metrics, Signals, significant_decrease
from pipeline.guards.settings import Guard

DIVERGENCE_METRICS = ("score", "score_stderr", "gold", "gold_stderr")
"""Metrics whose trend over several iterations is checked: means and their standard errors."""

EPISODE_LIMITS = {"ended_by_turns": "ppo.max_turns", "ended_by_tokens": "ppo.max_new_tokens"}
"""Limits of an episode, by the metric for the fraction of episodes that each limit ended."""


MESSAGES: Mapping[str, str] = {
    "kl": "the KL to the reference is {kl:.3g} nats per response, above {limit:g}; raise"
    " ppo.kl_coef or lower ppo.actor.{rate}",
    "kl_per_token": "the KL to the reference is {value:.3g} nats per token, above {limit:g}: the"
    " actor may exploit its reward; raise ppo.kl_coef or lower ppo.actor.{rate}",
    "ratio_max": "the largest policy ratio is {ratio_max:.0f}, above {limit:.0f}: updates are too"
    " large; lower ppo.actor.{rate}, ppo.ppo_epochs or ppo.target_kl",
    "entropy": "entropy went from {first[entropy]:.3g} to {entropy:.3g} nats per token: responses"
    " are becoming {effect}; lower ppo.actor.{rate} or raise ppo.kl_coef",
    "response_length": "responses went from {first[response_length]:.0f} to {response_length:.0f}"
    " tokens: the reward may favor length; check the samples, or raise ppo.kl_coef",
    "stop_rate": "{stop_rate:.0%} of responses end before the limit, compared with"
    " {first[stop_rate]:.0%} initially: {remedy}",
    "repetition": "{repetition:.0%} of tokens repeat a phrase of their response, above {limit:.0%}:"
    " responses loop; raise ppo.kl_coef, or penalize repetition in the reward",
    "explained_variance": "the critic explains {explained_variance:.2f} of the returns' variance,"
    " below {limit:g}: advantages are noise; tune ppo.critic.{critic_rate}",
    "skipped": "{skipped:.2g} optimizer steps per update were skipped, above {limit:g}: gradients"
    " are not finite; lower ppo.actor.{rate} or, with precision fp16, use bf16 or fp32",
    "dead_groups": "{dead_groups:.0%} of prompts have responses with equal rewards, above"
    " {limit:.0%}: they give no gradient; use other prompts, or set ppo.dynamic_sampling",
    "reward_failures": "{reward_failures:.0%} of responses have no reward, above {limit:.0%}: check"
    " why sources failed, or raise ppo.reward_timeout",
    "rollout_gap": "generation and training differ by {rollout_gap:.2g} nats per token, above"
    " {limit:g}: responses are off-policy; set ppo.correction, or use a higher precision",
}


@dataclass(frozen=True)
class RLSignals(Signals):
    """The signals of an iteration of step 3."""

    has_eos_penalty: bool = True
    """Whether `ppo.missing_eos_score` bounds the score of unfinished responses."""

    rate: str = "optim.lr"  # pyrefly: ignore[bad-override]
    critic_rate: str = "optim.lr"

    responses: int = 256
    """Number of responses in a rollout."""

    INITIAL_METRICS = ("entropy", "response_length", "stop_rate")
    TREND_METRICS = DIVERGENCE_METRICS
    UNIT = "iteration"
    ROLLBACK_CHANGES = "half the learning rate and twice kl_coef"
    MESSAGES = MESSAGES

    def compute_value(self, signal: str, metrics: Metrics, first: Metrics) -> float | None:
        """Return the signal in the unit of its limit, or None if it was not measured."""
        match signal:
            case "kl_per_token":
                return metrics["kl"] / metrics["response_length"] if "kl" in metrics else None
            case "entropy" | "response_length":
                return metrics[signal] / first[signal] if first[signal] > 0 else 1.0
            case "stop_rate":
                return significant_decrease(
                    first["stop_rate"], metrics["stop_rate"], self.responses
                )
            case _:
                return metrics.get(signal)

    def has_trend(self, guard: Guard, history: Sequence[Metrics]) -> bool:
        """Return whether the trained reward and the gold reward diverge."""
        return diverges(history, errors=guard.limit)

    def format_message(
        self, guard: Guard, metrics: Metrics, first: Metrics, history: Sequence[Metrics]
    ) -> str:
        """Return a sentence that states the problem and its remedy."""
        if guard.signal == "divergence":
            return _describe_divergence(history, self.rate)
        values = {
            "effect": "alike" if guard.limit < 1 else "random",
            "remedy": _get_remedy(metrics, has_eos_penalty=self.has_eos_penalty),
            "critic_rate": self.critic_rate,
        }
        return super().format_message(guard, {**metrics, **values}, first, history)


def diverges(history: Sequence[Metrics], *, errors: float) -> bool:
    """Return whether the trained reward rises and gold falls by more than `errors` standard errors.

    The slopes are those of least-squares lines through all of `history`. The result is False if an
    iteration lacks one of `DIVERGENCE_METRICS`.
    """
    if any(name not in row for row in history for name in DIVERGENCE_METRICS):
        return False
    proxy, gold = (
        slope_in_errors([row[name] for row in history], [row[f"{name}_stderr"] for row in history])
        for name in ("score", "gold")
    )
    return proxy > errors and gold < -errors


def _describe_divergence(history: Sequence[Metrics], rate: str) -> str:
    proxy, gold = (fitted_change([row[name] for row in history]) for name in ("score", "gold"))
    return (
        f"over {len(history)} iterations, the trained reward rose by {proxy:.2g} and gold fell by"
        f" {-gold:.2g}: the actor exploits its reward; fix the reward, raise ppo.kl_coef or lower"
        f" ppo.actor.{rate}"
    )


def _get_remedy(metrics: Metrics, *, has_eos_penalty: bool) -> str:
    """Return the remedy for responses that don't end; it depends on the limits reached."""
    ended = {name: metrics[metric] for metric, name in EPISODE_LIMITS.items() if metric in metrics}
    reached = sorted((name for name in ended if ended[name] > 0), key=lambda name: -ended[name])
    if ended and not reached:
        return "the environment failed in the other episodes; see reward_failures"
    or_score = ", or lower ppo.missing_eos_score" if has_eos_penalty else ""
    return f"raise {' or '.join(reached) or 'ppo.max_new_tokens'}{or_score}"
