"""Log-probabilities and entropy of given tokens, in plain PyTorch: the definition.

Dimension names: K targets, d hidden size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

NO_TARGET = -(2**31)
"""Of PyTorch's loss, which would pass over -100, the usual one, without a word."""


def linear_logprobs(
    hidden: Float[Tensor, "K d"],
    weight: Float[Tensor, "V d"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " K"],
    *,
    temperature: float,
    entropy: bool,
    entropy_learns: bool = True,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Log-probabilities of the targets, and entropies, of softmax(hidden @ weight.T + bias)."""
    return logprobs_of(
        F.linear(hidden, weight, bias),
        targets,
        temperature=temperature,
        entropy=entropy,
        entropy_learns=entropy_learns,
    )


def logprobs_of(
    logits: Float[Tensor, "K V"],
    targets: Int[Tensor, " K"],
    *,
    temperature: float,
    entropy: bool,
    entropy_learns: bool = True,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Log-probabilities from logits, which `temperature` divides; nats, fp32.

    An entropy that nothing learns from has no graph, which would be as large as the logits.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    all_logprobs = logits.log_softmax(dim=-1)
    logprobs = -F.nll_loss(all_logprobs, targets, ignore_index=NO_TARGET, reduction="none")
    if not entropy:
        return logprobs, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_learns):
        return logprobs, categorical_entropy(all_logprobs)


def categorical_entropy(logprobs: Float[Tensor, "K V"]) -> Float[Tensor, " K"]:
    """-sum p log p of distributions given by their log p, in nats."""
    return -(logprobs.exp() * logprobs).sum(dim=-1)
