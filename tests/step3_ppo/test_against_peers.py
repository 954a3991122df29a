"""Losses and advantages against TRL and verl, if `pip install trl` and `verl` were run."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from step3_ppo.advantages import ESTIMATORS, RewardedResponses
from step3_ppo.losses import (
    KL_LOSSES,
    LOSSES,
    Aggregate,
    TrustRegion,
    Weighting,
    value_loss,
    whiten,
)

MAX_NEW_TOKENS = 8
LENGTHS = (3, 8, 1, 5, 2, 4)
MASK = torch.arange(MAX_NEW_TOKENS) < torch.tensor(LENGTHS)[:, None]
GROUP_SIZE = 3


def random_tensor(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Return random numbers in float64, so that only differences in the formulas matter."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


OLD = random_tensor(1, *MASK.shape) - 2
NEW = OLD + random_tensor(2, *MASK.shape, scale=0.3)
REFERENCE = OLD + random_tensor(3, *MASK.shape, scale=0.3)
ADVANTAGES = random_tensor(4, len(LENGTHS))


def our_loss(
    loss: str,
    aggregate: Aggregate,
    region: TrustRegion,
    *,
    kl_coef: float = 0.0,
    estimator: str = "k3",
) -> tuple[Tensor, Tensor]:
    """Compute our loss of six responses as one minibatch, and its gradient by log-probability."""
    logprobs = NEW.clone().requires_grad_()
    flat, old = logprobs[MASK], OLD[MASK]
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)[:, None].expand_as(MASK)[MASK]
    weighting = Weighting(aggregate, int(MASK.sum()), len(LENGTHS), MAX_NEW_TOKENS)
    policy_loss = LOSSES[loss]
    ratio = policy_loss.ratio(flat, old, MASK)
    advantages = ADVANTAGES[:, None].expand_as(MASK)[MASK]
    losses = policy_loss.losses(ratio, flat, advantages, region)
    if kl_coef:
        token_ratio = (flat - old).exp()
        losses = losses + kl_coef * KL_LOSSES[estimator](flat - REFERENCE[MASK], token_ratio)
    total = (weighting.token_weights(lengths) * losses).sum() / weighting.num_tokens
    total.backward()
    assert logprobs.grad is not None
    return total.detach(), logprobs.grad


def trl_loss(
    loss_type: str, level: str, region: TrustRegion, *, beta: float, corrected: bool
) -> tuple[Tensor, Tensor]:
    """Compute the same with TRL's trainer, whose log-probabilities are given."""
    trainer_class = pytest.importorskip("trl").GRPOTrainer
    logprobs = NEW.clone().requires_grad_()
    # TRL's bound for CISPO is the ratio itself.
    high = region.clip_high + (loss_type == "cispo")
    # The attributes that TRL's method reads from its trainer.
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(OLD), None),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=region.clip,
        epsilon_high=high,
        beta=beta,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=corrected, steps_per_generation=1),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_NEW_TOKENS,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda value: value, reduce=lambda value, **_: value
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros(MASK.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": MASK.long(),
        "advantages": ADVANTAGES,
        "old_per_token_logps": OLD,
        "ref_per_token_logps": REFERENCE,
        "num_items_in_batch": MASK.sum(),
    }
    loss = trainer_class._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


@pytest.mark.parametrize(
    ("loss", "aggregate", "loss_type", "level", "region"),
    [
        ("clip", "sequence", "grpo", "token", TrustRegion(0.2, 0.2)),
        ("clip", "token", "dapo", "token", TrustRegion(0.2, 0.28)),
        ("clip", "constant", "dr_grpo", "token", TrustRegion(0.2, 0.2)),
        ("gspo", "sequence", "grpo", "sequence", TrustRegion(0.05, 0.07)),
        ("cispo", "token", "cispo", "token", TrustRegion(0.2, 0.3)),
    ],
)
def test_method_losses_match_trl(
    loss: str, aggregate: Aggregate, loss_type: str, level: str, region: TrustRegion
) -> None:
    value, gradient = our_loss(loss, aggregate, region)

    expected, expected_gradient = trl_loss(loss_type, level, region, beta=0.0, corrected=False)

    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)
    assert (gradient == 0).sum() > (~MASK).sum() or loss == "cispo", "nothing was clipped"


@pytest.mark.parametrize(("estimator", "corrected"), [("k3", False), ("k3_is", True)])
def test_kl_loss_matches_trl(estimator: str, corrected: bool) -> None:
    region = TrustRegion(0.2, 0.2)

    value, gradient = our_loss("clip", "sequence", region, kl_coef=0.04, estimator=estimator)

    expected, expected_gradient = trl_loss("grpo", "token", region, beta=0.04, corrected=corrected)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)


def import_verl() -> Any:
    """Return the module of verl's algorithms."""
    return pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)


def make_rewarded(**changes: Any) -> RewardedResponses:
    """Return two groups of three responses, with rewards at their last tokens."""
    scores = random_tensor(5, len(LENGTHS))
    last = MASK.sum(dim=1, keepdim=True) - 1
    rewards = torch.zeros(MASK.shape, dtype=torch.float64).scatter(1, last, scores[:, None])
    defaults: dict[str, Any] = {
        "rewards": rewards,
        "mask": MASK,
        "scores": scores,
        "values": random_tensor(6, *MASK.shape) * MASK,
        "group_size": GROUP_SIZE,
        "gamma": 0.99,
        "lam": 0.9,
        "counted": torch.ones(len(LENGTHS), dtype=torch.bool),
    }
    return RewardedResponses(**{**defaults, **changes})


GROUPS = np.repeat(np.arange(len(LENGTHS) // GROUP_SIZE), GROUP_SIZE)


def whiten_like_verl(values: Tensor) -> Tensor:
    """Whiten with the unbiased variance, as verl does."""
    real = values[MASK]
    mean, variance = real.mean().item(), real.var(unbiased=True).item()
    return whiten(values, MASK, mean=mean, variance=variance)


@pytest.mark.parametrize(
    ("advantage", "name", "arguments"),
    [
        ("grpo", "compute_grpo_outcome_advantage", {"epsilon": 1e-4}),
        ("dr_grpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "compute_rloo_outcome_advantage", {}),
    ],
)
def test_group_advantages_match_verl(advantage: str, name: str, arguments: dict[str, Any]) -> None:
    responses = make_rewarded()

    estimate = ESTIMATORS[advantage](responses)

    expected, _ = getattr(import_verl(), name)(
        responses.rewards.clone(), MASK.double(), GROUPS, **arguments
    )
    torch.testing.assert_close(estimate.advantages.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("group_baseline", [False, True])
def test_reinforce_pp_advantages_match_verl(group_baseline: bool) -> None:
    # With a baseline verl gives all tokens of a response the same advantage, like gamma 1.
    responses = make_rewarded(gamma=1.0 if group_baseline else 0.99, group_baseline=group_baseline)
    core = import_verl()
    name = "reinforce_plus_plus_baseline" if group_baseline else "reinforce_plus_plus"

    estimate = ESTIMATORS["reinforce_pp"](responses)

    compute = getattr(core, f"compute_{name}_outcome_advantage")
    arguments = {"index": GROUPS} if group_baseline else {}
    expected, _ = compute(
        responses.rewards.clone(),
        response_mask=MASK.double(),
        config=SimpleNamespace(gamma=responses.gamma),
        **arguments,
    )
    actual = whiten_like_verl(estimate.advantages.double())
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_gae_matches_verl() -> None:
    responses = make_rewarded()
    assert responses.values is not None

    estimate = ESTIMATORS["gae"](responses)

    expected, returns = import_verl().compute_gae_advantage_return(
        responses.rewards, responses.values, MASK.double(), responses.gamma, responses.lam
    )
    assert estimate.returns is not None
    torch.testing.assert_close(estimate.returns[MASK], returns[MASK])
    torch.testing.assert_close(
        whiten_like_verl(estimate.advantages), expected * MASK, rtol=1e-6, atol=1e-6
    )


def test_value_loss_matches_verl() -> None:
    old, values, returns = (
        random_tensor(6, *MASK.shape),
        random_tensor(7, *MASK.shape),
        random_tensor(8, *MASK.shape),
    )

    loss = value_loss(values[MASK], old[MASK], returns[MASK], clip=0.2)

    expected, _ = import_verl().compute_value_loss(values, returns, old, MASK.double(), 0.2)
    torch.testing.assert_close(loss / MASK.sum(), expected)


@pytest.mark.parametrize(
    ("loss", "aggregate", "name", "mode"),
    [
        ("clip", "token", "vanilla", "token-mean"),
        ("clip", "sequence", "vanilla", "seq-mean-token-mean"),
        ("gspo", "sequence", "gspo", "seq-mean-token-mean"),
        ("cispo", "token", "cispo", "token-mean"),
    ],
)
def test_method_losses_match_verl(loss: str, aggregate: Aggregate, name: str, mode: str) -> None:
    core = import_verl()
    settings = pytest.importorskip("verl.workers.config", exc_type=ImportError)

    # verl also bounds CISPO's ratio from below, and the loss of negative advantages: neither
    # bound is reached here.
    low = 0.99 if loss == "cispo" else 0.05
    region = TrustRegion(low, 0.07, dual_clip=10.0 if loss == "clip" else None)
    config = settings.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=0.07,
        clip_ratio_c=10.0,
        loss_agg_mode=mode,
    )
    logprobs = NEW.clone().requires_grad_()

    value, gradient = our_loss(loss, aggregate, region)

    expected, _ = getattr(core, f"compute_policy_loss_{name}")(
        old_log_prob=OLD,
        log_prob=logprobs,
        advantages=ADVANTAGES[:, None].expand_as(MASK),
        response_mask=MASK.double(),
        loss_agg_mode=mode,
        config=config,
    )
    expected.backward()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, logprobs.grad, rtol=1e-6, atol=1e-7)
