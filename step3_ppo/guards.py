"""What the guards' signals are in numbers, and what each says of a run in a sentence."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.guards.settings import Guard
from pipeline.guards.signals import Metrics, Signals, percent

OF_DIVERGENCE = ("score", "score_stderr", "gold", "gold_stderr")
"""Metrics whose course over some iterations is looked at: means and their standard errors."""

LIMITS = {"ended_by_turns": "ppo.max_turns", "ended_by_tokens": "ppo.max_new_tokens"}
"""The limits of an episode, by the metric that has the share of episodes each one ended."""


@dataclass(frozen=True)
class RLSignals(Signals):
    """The signals of an iteration of step 3."""

    scores_ends: bool = True
    """Whether `ppo.missing_eos_score` bounds what responses without an end count."""

    OF_THE_START = ("entropy", "response_length", "stop_rate")
    OF_TRENDS = OF_DIVERGENCE
    UNIT = "iteration"
    SLOWER = "half the learning rate and twice kl_coef"

    def value_of(self, signal: str, metrics: Metrics, first: Metrics) -> float | None:
        """The signal in the unit of its limit; None where it was not measured."""
        match signal:
            case "kl_per_token":
                return metrics["kl"] / metrics["response_length"]
            case "entropy" | "response_length":
                return metrics[signal] / first[signal] if first[signal] > 0 else 1.0
            case "stop_rate":
                return first["stop_rate"] - metrics["stop_rate"]
            case _:
                return metrics.get(signal)

    def shows_trend(self, guard: Guard, history: Sequence[Metrics]) -> bool:
        """Whether the run diverges from gold."""
        return diverges(history, errors=guard.limit)

    def sentence_of(
        self, guard: Guard, metrics: Metrics, first: Metrics, history: Sequence[Metrics]
    ) -> str:
        """What is out of order, and what may help."""
        if guard.signal == "divergence":
            return _divergence(history)
        if guard.signal == "stop_rate":
            return (
                f"{percent(metrics['stop_rate'])} of responses end by themselves, against"
                f" {percent(first['stop_rate'])} at first:"
                f" {_ends(metrics, scores_ends=self.scores_ends)}"
            )
        return SENTENCES[guard.signal](metrics, first, guard.limit)


def diverges(history: Sequence[Metrics], *, errors: float) -> bool:
    """Whether what is trained on rises and gold falls, each by more than that many standard errors.

    Over all of `history`, by the slopes of the least-squares lines; False where an iteration lacks
    one of `OF_DIVERGENCE`.
    """
    if any(name not in each for each in history for name in OF_DIVERGENCE):
        return False
    proxy, gold = (
        slope_in_errors(
            [each[name] for each in history], [each[f"{name}_stderr"] for each in history]
        )
        for name in ("score", "gold")
    )
    return proxy > errors and gold < -errors


def _divergence(history: Sequence[Metrics]) -> str:
    proxy, gold = (change([each[name] for each in history]) for name in ("score", "gold"))
    return (
        f"over {len(history)} iterations what is trained on rose by {proxy:.2g} and gold fell by"
        f" {-gold:.2g}: the actor exploits its reward; correct the reward, raise ppo.kl_coef or"
        " lower ppo.actor.optim.lr"
    )


def _ends(metrics: Metrics, *, scores_ends: bool) -> str:
    """What lets responses end by themselves; of episodes by what ended them instead."""
    ended = {name: metrics[metric] for metric, name in LIMITS.items() if metric in metrics}
    reached = sorted((name for name in ended if ended[name] > 0), key=lambda name: -ended[name])
    if ended and not reached:
        return "the environment failed in the others; see reward_failures"
    score = ", or lower ppo.missing_eos_score" if scores_ends else ""
    return f"raise {' or '.join(reached) or 'ppo.max_new_tokens'}{score}"


def _kl(metrics: Metrics, _: Metrics, limit: float) -> str:
    return (
        f"the actor is {metrics['kl']:.3g} nats a response from the reference, beyond {limit:g};"
        " to keep it nearer, raise ppo.kl_coef or lower ppo.actor.optim.lr"
    )


def _kl_per_token(metrics: Metrics, _: Metrics, limit: float) -> str:
    kl = metrics["kl"] / metrics["response_length"]
    return (
        f"the actor is {kl:.2f} nats a token from the reference, beyond {limit:g}: its"
        " responses may please what rewards them alone; raise ppo.kl_coef or lower"
        " ppo.actor.optim.lr"
    )


def _ratio(metrics: Metrics, _: Metrics, limit: float) -> str:
    return (
        f"updates made a token {metrics['ratio_max']:.0f} times as likely, beyond {limit:.0f}"
        " times: they go too far; lower ppo.actor.optim.lr, ppo.ppo_epochs or ppo.target_kl"
    )


def _entropy(metrics: Metrics, first: Metrics, limit: float) -> str:
    return (
        f"entropy went from {first['entropy']:.3g} to {metrics['entropy']:.3g} nats a token:"
        f" responses {'all become alike' if limit < 1 else 'become noise'}; lower"
        " ppo.actor.optim.lr or raise ppo.kl_coef"
    )


def _length(metrics: Metrics, first: Metrics, _: float) -> str:
    return (
        f"responses went from {first['response_length']:.0f} to"
        f" {metrics['response_length']:.0f} tokens: the reward may favour their length; read the"
        " samples, or raise ppo.kl_coef"
    )


def _repetition(metrics: Metrics, _: Metrics, limit: float) -> str:
    return (
        f"{percent(metrics['repetition'])} of tokens repeat a phrase of their response, beyond"
        f" {percent(limit)}: responses run in loops; raise ppo.kl_coef, or take repetition off"
        " the reward"
    )


def _explained_variance(metrics: Metrics, _: Metrics, limit: float) -> str:
    return (
        f"the critic explains {metrics['explained_variance']:.2f} of the returns' variance, below"
        f" {limit:g}: advantages are noise; change ppo.critic.optim.lr, or raise"
        " ppo.critic_warmup_steps"
    )


def _skipped(metrics: Metrics, _: Metrics, limit: float) -> str:
    return (
        f"{metrics['skipped']:.2g} optimizer steps of an update were skipped, beyond {limit:g}:"
        " gradients are not finite; lower ppo.actor.optim.lr, or train with precision bf16 or fp32"
    )


def _dead_groups(metrics: Metrics, _: Metrics, limit: float) -> str:
    return (
        f"{percent(metrics['dead_groups'])} of prompts have responses of equal rewards, beyond"
        f" {percent(limit)}: they teach nothing; take other prompts, or set ppo.dynamic_sampling"
    )


def _reward_failures(metrics: Metrics, _: Metrics, limit: float) -> str:
    return (
        f"{percent(metrics['reward_failures'])} of responses have no reward, beyond"
        f" {percent(limit)}: look at why they failed, or raise ppo.reward_timeout"
    )


def _rollout_gap(metrics: Metrics, _: Metrics, limit: float) -> str:
    return (
        f"generation and training differ by {metrics['rollout_gap']:.2g} nats a token, beyond"
        f" {limit:g}: responses are another policy's; set ppo.correction, or a higher precision"
    )


SENTENCES: Mapping[str, Callable[[Metrics, Metrics, float], str]] = {
    "kl": _kl,
    "kl_per_token": _kl_per_token,
    "ratio_max": _ratio,
    "entropy": _entropy,
    "response_length": _length,
    "repetition": _repetition,
    "explained_variance": _explained_variance,
    "skipped": _skipped,
    "dead_groups": _dead_groups,
    "reward_failures": _reward_failures,
    "rollout_gap": _rollout_gap,
}
"""By signal, of the iteration's metrics, those of the first rollout and the limit."""


def slope_in_errors(values: Sequence[float], errors: Sequence[float]) -> float:
    """The slope of the least-squares line through equally spaced means, in its standard errors.

    With t the centred places: slope = sum(t y) / sum(t^2), of variance sum(t^2 e^2) / sum(t^2)^2,
    where e are the standard errors of the means. Infinite where there is a slope and no error.
    """
    places = _centred(len(values))
    rise = math.fsum(t * y for t, y in zip(places, values, strict=True))
    error = math.sqrt(math.fsum((t * e) ** 2 for t, e in zip(places, errors, strict=True)))
    if error == 0:
        return 0.0 if rise == 0 else math.copysign(math.inf, rise)
    return rise / error


def change(values: Sequence[float]) -> float:
    """From the first to the last place of the least-squares line through equally spaced values."""
    places = _centred(len(values))
    slope = math.fsum(t * y for t, y in zip(places, values, strict=True))
    return slope / math.fsum(t * t for t in places) * (len(values) - 1)


def _centred(count: int) -> list[float]:
    return [place - (count - 1) / 2 for place in range(count)]
