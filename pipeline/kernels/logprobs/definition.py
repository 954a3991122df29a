"""Log-probabilities and entropy of given tokens, in plain PyTorch: the definition.

Dimension names: K targets, d hidden size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

NO_TARGET = -(2**31)
"""Of PyTorch's loss, which would pass over -100, the usual one, without a word."""


def check(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> None:
    """Raise unless the shapes, number formats and devices fit together.

    Raises:
        ValueError: one sentence, which names what does not.
    """
    if targets.ndim != 1 or targets.dtype != torch.int64:
        raise ValueError(
            f"log-probabilities: targets are a vector of int64, not {targets.dtype} of shape"
            f" {tuple(targets.shape)}"
        )
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(
            f"log-probabilities: the output matrix has shape {tuple(weight.shape)}; it must have"
            " words and a width"
        )
    words, width = weight.shape
    shapes: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "weight": (weight, (words, width)),
        "hidden": (hidden, (len(targets), width)),
    }
    if bias is not None:
        shapes["bias"] = (bias, (words,))
    for name, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"log-probabilities of {len(targets)} targets: {name} has shape"
                f" {tuple(tensor.shape)}, not {shape}"
            )
        if (tensor.dtype, tensor.device) != (weight.dtype, targets.device):
            raise ValueError(
                f"log-probabilities: {name} is {tensor.dtype} on {tensor.device}, the output matrix"
                f" {weight.dtype} and the targets on {targets.device}"
            )


def check_rows(logits: Tensor, targets: Tensor) -> None:
    """Raise unless there is a row of logits for each target.

    Raises:
        ValueError: one sentence, which names what does not fit.
    """
    if logits.ndim != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"log-probabilities: logits must be numbers of (targets, words), and are"
            f" {logits.dtype} of shape {tuple(logits.shape)}"
        )
    if targets.dtype != torch.int64 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"log-probabilities of {len(logits)} rows of logits: targets must be as many of int64,"
            f" and are {targets.dtype} of shape {tuple(targets.shape)}"
        )
    if targets.device != logits.device:
        raise ValueError(
            f"log-probabilities: logits are on {logits.device}, the targets on {targets.device}"
        )


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
