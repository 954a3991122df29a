"""The loss that the settings select, for a batch of rows, and its metrics.

Dimension name: S sequences of a batch, the chosen ones first.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.models.passes import ForwardPasses
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from step3_preference.config import PreferenceConfig
from step3_preference.losses import (
    hinge_loss,
    ipo_loss,
    kto_loss,
    nll_loss,
    orpo_loss,
    sigmoid_loss,
)
from step3_preference.rows import RowBatch


@dataclass(frozen=True)
class KTOInputs:
    """Inputs of KTO's loss other than the responses of a batch."""

    z0: float = 0.0
    """The reference point, in nats per response."""

    weight_chosen: float = 1.0
    weight_rejected: float = 1.0


@dataclass(frozen=True)
class MetricSums:
    """Sums over rows and sequences, from which means are computed."""

    sums: Float[Tensor, "8"]
    """Loss and number of correctly ordered rows; reward, log-probability per token and number of
    the chosen and of the rejected responses. In fp64, on the model's device."""

    @classmethod
    def zero(cls) -> "MetricSums":
        """Return the sums for no rows."""
        return cls(torch.zeros(8, dtype=torch.float64, device=local_device()))

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(self.sums + other.sums)

    def means(self, passes: ForwardPasses, rows: int, *, paired: bool) -> dict[str, float]:
        """Return means over all processes: loss and accuracy per row, the rest per sequence.

        In a pipeline, the last stage's sums are used.
        """
        sums = passes.from_last_stage(self.sums.tolist())
        loss, num_right, *sides, chosen, rejected = current_mesh().data.sums(sums)
        counts = (chosen, rejected, chosen, rejected)
        names = ("reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")
        means = {
            name: value / max(1.0, count)
            for name, value, count in zip(names, sides, counts, strict=True)
        }
        return {
            "loss": loss / rows,
            "accuracy": num_right / (rows if paired else max(1.0, chosen + rejected)),
            "margin": means["reward_chosen"] - means["reward_rejected"],
            **means,
        }


def objective(
    batch: RowBatch,
    logp: Float[Tensor, " S"],
    reference: Float[Tensor, " S"],
    config: PreferenceConfig,
    kto: KTOInputs,
) -> tuple[Float[Tensor, ""], MetricSums]:
    """Compute the loss, summed over rows, and the metrics of the batch.

    Args:
        batch: the rows.
        logp: the actor's log-probability of each response.
        reference: the reference's log-probability of each response; zeros without a reference.
        config: the loss and its settings.
        kto: KTO's additional inputs.
    """
    lengths = batch.lengths()
    log_ratios = logp - reference
    log_ratios = log_ratios / lengths if config.is_mean else log_ratios
    num_chosen = len(batch.chosen)
    chosen, rejected = log_ratios[:num_chosen], log_ratios[num_chosen:]
    if config.is_unpaired:
        loss = kto_loss(
            chosen,
            rejected,
            beta=config.beta,
            z0=kto.z0,
            weight_good=kto.weight_chosen,
            weight_bad=kto.weight_rejected,
        )
        margins = torch.cat([chosen - kto.z0, kto.z0 - rejected]).detach()
    else:
        loss = paired_loss(chosen, rejected, config)
        margins = (chosen - rejected).detach()
    if config.nll_coef:
        loss = loss + config.nll_coef * nll_loss(logp[:num_chosen] / lengths[:num_chosen])
    with torch.no_grad():
        per_token = logp / lengths
        num_right = (margins > 0).sum() + 0.5 * (margins == 0).sum()
        sides = (config.beta * chosen, config.beta * rejected)
        sides += (per_token[:num_chosen], per_token[num_chosen:])
        sums = [loss, num_right, *(side.sum() for side in sides)]
        counts = [loss.new_full((), count) for count in (num_chosen, len(log_ratios) - num_chosen)]
        metric_sums = torch.stack([side.float() for side in (*sums, *counts)]).double()
    return loss, MetricSums(metric_sums)


def paired_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], config: PreferenceConfig
) -> Float[Tensor, ""]:
    """Compute the loss selected by `config.loss` over pairs."""
    if config.loss == "orpo":
        return orpo_loss(chosen, rejected, beta=config.beta)
    h = chosen - rejected
    if config.loss == "ipo":
        return ipo_loss(h, beta=config.beta)
    if config.loss == "hinge":
        return hinge_loss(h, beta=config.beta)
    return sigmoid_loss(
        h,
        beta=config.beta,
        gamma=config.gamma,
        label_smoothing=config.label_smoothing,
        robust=config.robust,
    )


def kto_weights(good: int, bad: int, config: PreferenceConfig) -> tuple[float, float]:
    """Return the weights of good and bad responses, given their numbers in the data.

    `auto` raises the weight of the rarer kind, so that both kinds have the same total weight
    (Ethayarajh et al. 2024, eq. 9).
    """
    if not config.is_unpaired:
        return 1.0, 1.0
    balanced = (max(1.0, bad / max(1, good)), max(1.0, good / max(1, bad)))
    configured = (config.weight_chosen, config.weight_rejected)
    weight_good, weight_bad = (
        weight if setting == "auto" else setting
        for setting, weight in zip(configured, balanced, strict=True)
    )
    return float(weight_good), float(weight_bad)
