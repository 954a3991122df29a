"""What the guards' signals are in numbers, and what each says of a run in a sentence."""

from collections.abc import Callable, Mapping, Sequence

from pipeline.guards.settings import Guard
from pipeline.guards.signals import Metrics, Signals, percent

REMEDY = "set preference.nll_coef (0.1 to 1), or lower preference.model.optim.lr"


class PreferenceSignals(Signals):
    """The signals of an evaluation: of held-out rows, and of sampled answers to prompts."""

    OF_THE_START = ("logp_chosen", "sampled_length", "sampled_stop_rate")
    UNIT = "step"
    SLOWER = "half the learning rate"

    def value_of(self, signal: str, metrics: Metrics, first: Metrics) -> float | None:
        """The signal in the unit of its limit; None where nothing was answered."""
        if signal == "chosen_nll":
            return first["logp_chosen"] - metrics["logp_chosen"]
        if "sampled_length" not in metrics:
            return None
        length, was_length = metrics["sampled_length"], first["sampled_length"]
        of_answers = {
            "kl": metrics["kl"],
            "kl_per_token": metrics["kl"] / length,
            "response_length": length / was_length,
            "stop_rate": first["sampled_stop_rate"] - metrics["sampled_stop_rate"],
            "repetition": metrics["sampled_repetition"],
        }
        return of_answers[signal]

    def sentence_of(
        self, guard: Guard, metrics: Metrics, first: Metrics, history: Sequence[Metrics]
    ) -> str:
        """What is out of order, and what may help."""
        del history
        return SENTENCES[guard.signal](metrics, first, guard.limit)


def _kl(metrics: Metrics, _: Metrics, limit: float) -> str:
    return (
        f"the actor is {metrics['kl']:.3g} nats an answer from where it began, beyond {limit:g}; to"
        " keep it nearer, raise preference.beta or lower preference.model.optim.lr"
    )


def _kl_per_token(metrics: Metrics, _: Metrics, limit: float) -> str:
    kl = metrics["kl"] / metrics["sampled_length"]
    return (
        f"the actor is {kl:.2f} nats a token from where it began, beyond {limit:g}: it may have"
        " unlearned more than the rows say; raise preference.beta or lower"
        " preference.model.optim.lr"
    )


def _chosen_nll(metrics: Metrics, first: Metrics, limit: float) -> str:
    return (
        f"held-out chosen responses went from {first['logp_chosen']:.3g} to"
        f" {metrics['logp_chosen']:.3g} nats a token, a fall beyond {limit:g}: the loss rewards the"
        f" difference to rejected ones alone; {REMEDY}"
    )


def _length(metrics: Metrics, first: Metrics, _: float) -> str:
    return (
        f"answers went from {first['sampled_length']:.0f} to {metrics['sampled_length']:.0f}"
        " tokens: the rows may favour their length; read the samples, raise preference.beta, or"
        " take --method ldpo or simpo, which compare means over tokens"
    )


def _stop_rate(metrics: Metrics, first: Metrics, _: float) -> str:
    return (
        f"{percent(metrics['sampled_stop_rate'])} of sampled answers end by themselves, of the"
        f" actor as it began {percent(first['sampled_stop_rate'])}: the end of a turn is common to"
        f" both responses and loses its probability with them; {REMEDY}"
    )


def _repetition(metrics: Metrics, _: Metrics, limit: float) -> str:
    return (
        f"{percent(metrics['sampled_repetition'])} of tokens repeat a phrase of their answer,"
        f" beyond {percent(limit)}: answers run in loops; {REMEDY}"
    )


SENTENCES: Mapping[str, Callable[[Metrics, Metrics, float], str]] = {
    "kl": _kl,
    "kl_per_token": _kl_per_token,
    "chosen_nll": _chosen_nll,
    "response_length": _length,
    "stop_rate": _stop_rate,
    "repetition": _repetition,
}
"""By signal, of the evaluation's figures, those of the start and the limit."""
