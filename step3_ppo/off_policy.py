"""Differences between the policy that generates and the one that training evaluates."""

import logging
from functools import cache
from typing import Literal

import torch

from step3_ppo.config import PPOConfig
from step3_ppo.models import Models

logger = logging.getLogger(__name__)

GAP_LIMITS = {True: (1e-3, 0.05), False: (0.05, 2.0)}
"""By whether all weights are fp32: mean and largest gap, in nats, that rounding explains."""

RATIO_LIMITS = {True: 1e-3, False: 0.5}
"""By the same: how far from 1 the first update's ratio of any token may be."""


class OffPolicyError(RuntimeError):
    """Training sees another policy than the one that was rolled out."""


def check_rollout_gap(gap: float, models: Models, *, largest: float = 0.0) -> None:
    """Stop where generation's log-probabilities are not those of the trained weights.

    Rounding leaves a mean of up to 3e-2 nats below fp32 (adapters of extreme weights, merged into
    bf16) and 1e-6 in fp32; a wrong merge or a wrong position shows in the mean, or in few tokens.

    Args:
        gap: mean absolute difference in nats.
        models: whose actor generated.
        largest: that of a single token.

    Raises:
        OffPolicyError: the actor was gathered, merged or divided wrongly, or its family generates
            otherwise than it trains.
    """
    mean_limit, token_limit = GAP_LIMITS[_is_fp32(models)]
    if not (gap <= mean_limit and largest <= token_limit):
        raise OffPolicyError(
            f"generation's log-probabilities lie {gap:.2g} nats from training's in the mean and"
            f" {largest:.2g} at a token, more than {mean_limit} and {token_limit}: the answers are"
            " of another policy than the one that learns from them; please report the model, and"
            " set ppo.inference_tp_size 1 if it is not"
        )


def check_first_update(ratio_error: float, models: Models) -> None:
    """Stop at once where the first minibatch's ratio is not 1: nothing has been learned yet.

    fp32 allows 1e-3 for sums in another order; below fp32, where rounding is coarse, 0.5 at any
    token. Where the update backpropagates through the pass that scored the rollout, it is 1 but for
    rows that don't belong together; `check_rollout_gap` compares policies in any case.

    Raises:
        OffPolicyError: masks, positions or precision differ between rollout and training.
    """
    limit = RATIO_LIMITS[_is_fp32(models)]
    if ratio_error > limit:
        raise OffPolicyError(
            f"the first minibatch has a policy ratio {ratio_error:.2g} away from"
            f" 1, more than {limit}: training sees another policy than the one that was sampled"
        )


def _is_fp32(models: Models) -> bool:
    # Of all weights, not of the trained ones alone: fp32 adapters may sit on a bf16 base.
    return all(param.dtype == torch.float32 for param in models.policy.parameters())


def choose_correction(config: PPOConfig, *, gap: float) -> Literal["truncate", "mask"] | None:
    """Return the importance correction of a rollout.

    Args:
        config: settings of the step.
        gap: the `rollout_gap` of the rollout, in nats per token.
    """
    if config.correction != "auto":
        return None if config.correction == "none" else config.correction
    if gap <= config.correction_threshold:
        return None
    _announce_correction(config.correction_threshold, config.correction_cap)
    return "truncate"


@cache
def _announce_correction(threshold: float, cap: float) -> None:
    logger.info(
        "rollout_gap exceeds ppo.correction_threshold %g: importance weights of at most %g correct"
        " such rollouts (ppo.correction none disables this)",
        threshold,
        cap,
    )
