"""Values and messages of the guards' signals for an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.guards.guards import Metrics, Signals, significant_decrease

REMEDY = "set preference.nll_coef (0.1 to 1), or lower preference.model.{rate}"

MESSAGES: Mapping[str, str] = {
    "kl": "the KL to the initial actor is {kl:.3g} nats per response, above {limit:g}; raise"
    " preference.beta or lower preference.model.{rate}",
    "kl_per_token": "the KL to the initial actor is {value:.3g} nats per token, above {limit:g}:"
    " the actor may have lost abilities; raise preference.beta or lower preference.model.{rate}",
    "chosen_nll": "the log-probability of held-out chosen responses fell from"
    " {first[logp_chosen]:.3g} to {logp_chosen:.3g} nats per token, by more than {limit:g}: the"
    " loss rewards only the margin over rejected responses; " + REMEDY,
    "response_length": "responses went from {first[sampled_length]:.0f} to {sampled_length:.0f}"
    " tokens: the rows may favor length; check the samples, raise preference.beta, or use --method"
    " ldpo or simpo, which compare means over tokens",
    "stop_rate": "{sampled_stop_rate:.0%} of sampled responses end before the limit, compared with"
    " {first[sampled_stop_rate]:.0%} initially: the end-of-turn token, which chosen and rejected"
    " responses share, has become less likely; " + REMEDY,
    "repetition": "{sampled_repetition:.0%} of tokens repeat a phrase of their response, above"
    " {limit:.0%}: responses loop; " + REMEDY,
}


@dataclass(frozen=True)
class PreferenceSignals(Signals):
    """The signals of an evaluation, from held-out rows and sampled responses to prompts."""

    rate: str = "optim.lr"  # pyrefly: ignore[bad-override]
    prompts: int = 256
    """Number of sampled responses."""

    INITIAL_METRICS = ("logp_chosen", "sampled_length", "sampled_stop_rate")
    UNIT = "step"
    ROLLBACK_CHANGES = "half the learning rate"
    MESSAGES = MESSAGES

    def compute_value(self, signal: str, metrics: Metrics, first: Metrics) -> float | None:
        """Return the signal in its limit's unit, or None if it needs responses but none exist."""
        if signal == "chosen_nll":
            return first["logp_chosen"] - metrics["logp_chosen"]
        if "sampled_length" not in metrics:
            return None
        length, initial_length = metrics["sampled_length"], first["sampled_length"]
        stop_rate, initial_stop_rate = metrics["sampled_stop_rate"], first["sampled_stop_rate"]
        values = {
            "kl": metrics["kl"],
            "kl_per_token": metrics["kl"] / length,
            "response_length": length / initial_length,
            "stop_rate": significant_decrease(initial_stop_rate, stop_rate, self.prompts),
            "repetition": metrics["sampled_repetition"],
        }
        return values[signal]
