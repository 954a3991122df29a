"""Scored responses, what is derived from them, and the minibatches that updates learn from.

Dimension names: B responses of this process, T tokens of the longest, K response tokens of a piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from pipeline.data.batches import TokenBatch, collate, local_micro_batches
from pipeline.data.examples import Encoded
from pipeline.models.forward import TokenLogprobs
from pipeline.parallel.device import local_device, send
from step3_ppo.config import PPOConfig


@dataclass(frozen=True)
class Forward:
    """One pass of actor and critic over a process's whole rollout, with its autograd graph."""

    policy: TokenLogprobs
    values: Float[Tensor, " K"] | None
    """None without a critic."""

    def outputs(self) -> dict[str, Tensor]:
        """The models' outputs, detached."""
        assert self.policy.entropy is not None
        outputs = {
            "logprobs": self.policy.logprobs.detach(),
            "entropy": self.policy.entropy.detach(),
        }
        return outputs if self.values is None else outputs | {"values": self.values.detach()}


@dataclass(frozen=True)
class Experience:
    """Responses, and what each model computes for them before any update."""

    sequences: list[Encoded]
    """Prompt and response; the actor's tokens are the trained ones."""

    stopped: Bool[Tensor, " B"]
    """Whether the response ended with a stop token."""

    mask: Bool[Tensor, "B T"]
    """True on response tokens, the end-of-turn token included."""

    sampled_logprobs: Float[Tensor, "B T"]
    """log pi as generation computed it."""

    logprobs: Float[Tensor, "B T"]
    """log pi as training computes it, before any update: the old policy of the ratio."""

    ref_logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"] | None
    """Value of the state before each token; None without a critic."""

    score: Float[Tensor, " B"] | None
    """The reward model's raw score of the whole sequence; None without a reward model."""

    forward: Forward | None = None
    """The pass that the first update may backpropagate through, once."""

    @cached_property
    def mask_on_host(self) -> Bool[Tensor, "B T"]:
        """The mask, read from the device once."""
        return self.mask.cpu()


@dataclass(frozen=True)
class Minibatch:
    """The response tokens of some rows, concatenated: everything an update needs."""

    tokens: TokenBatch
    mask: Bool[Tensor, "B T"]
    """The places of the K tokens, in order, in their responses."""

    old_logprobs: Float[Tensor, " K"]
    ref_logprobs: Float[Tensor, " K"]
    advantages: Float[Tensor, " K"]
    lengths: Float[Tensor, " K"]
    """For each token, the number of tokens of its response."""

    counted: Float[Tensor, " K"]
    """0 for tokens that are left out of every loss, else 1."""

    positive: Float[Tensor, " K"]
    """1 for tokens of responses with a reward above 0, else 0."""

    correction: Float[Tensor, " K"] | None
    """Importance weights of `step3_ppo.correction`; None for none."""

    kl_coef: float
    """Weight of the KL penalty in the loss."""

    old_values: Float[Tensor, " K"] | None
    returns: Float[Tensor, " K"] | None
    """What the critic learns; both are None without a critic."""


@dataclass(frozen=True)
class Rollout:
    """Experience with what is derived from it; fixed over all epochs of updates."""

    experience: Experience
    reward_score: Float[Tensor, " B"]
    """The reward of each response, before the KL penalty."""

    rewards: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None
    """What the critic learns; None without a critic."""

    counted: Bool[Tensor, " B"]
    """False for responses that are left out of baselines and losses."""

    correction: Float[Tensor, "B T"] | None = None
    """Importance weights where generation's policy differs from training's; None for none."""

    group_size: int = 1
    """Responses to each prompt, which are adjacent."""

    kl_coef: float = 0.0
    """Weight of the KL penalty in the loss; 0 where it is in the reward."""

    def minibatch(self, rows: Sequence[int]) -> Minibatch:
        """The rows, concatenated; without rows, a minibatch that has no gradient."""
        experience = self.experience
        device, taken = experience.mask.device, torch.tensor(list(rows) or [0])
        index = send(taken, device)
        mask = experience.mask[index] if rows else torch.zeros_like(experience.mask[index])
        sequences = [experience.sequences[row] for row in taken.tolist()]
        if not rows:
            sequences = [Encoded.untrained(sequences[0].input_ids)]
        lengths = mask.sum(dim=1, keepdim=True).expand_as(mask)
        # Computed on the host, to avoid a device synchronization.
        here = experience.mask_on_host[taken] if rows else torch.zeros(0, dtype=torch.bool)
        places = send(here.flatten().nonzero().squeeze(1), device)

        def tokens_of(padded: Shaped[Tensor, "_B _T"]) -> Shaped[Tensor, " K"]:
            return padded.flatten()[places]

        def of_response(flags: Bool[Tensor, " B"]) -> Float[Tensor, " K"]:
            return tokens_of(flags[index, None].expand_as(mask)).float()

        def of_tokens(values: Float[Tensor, "B T"] | None) -> Float[Tensor, " K"] | None:
            return None if values is None else tokens_of(values[index])

        return Minibatch(
            tokens=collate(sequences).to(local_device()),
            mask=mask,
            old_logprobs=tokens_of(experience.logprobs[index]),
            ref_logprobs=tokens_of(experience.ref_logprobs[index]),
            advantages=tokens_of(self.advantages[index]),
            lengths=tokens_of(lengths).float(),
            counted=of_response(self.counted),
            positive=of_response(self.counted & (self.reward_score > 0)),
            correction=of_tokens(self.correction),
            kl_coef=self.kl_coef,
            old_values=of_tokens(experience.values),
            returns=of_tokens(self.returns),
        )


def own_micro_batches(config: PPOConfig, lengths: Sequence[int]) -> list[list[int]]:
    """The rows of this process's micro-batches, as many as on every process; some may be empty.

    Args:
        config: settings of the step.
        lengths: tokens of each row.
    """
    return local_micro_batches(
        lengths,
        max_tokens=config.micro_batch_size * config.max_length,
        at_least=config.least_micro_batches,
    )
