"""What the operators compute, in plain PyTorch: the definition that every kernel is held to.

Dimension names: n elements of a flat vector, K targets, d hidden size, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int16
from torch import Tensor

MOMENTS = (torch.float32, torch.bfloat16)
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
COPIES = (torch.bfloat16, torch.float16)

NO_TARGET = -(2**31)
"""Of PyTorch's loss, which would pass over -100, the usual one, without a word."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """The numbers of one step of AdamW (Loshchilov and Hutter 2019, algorithm 2)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    step: int
    """1 for the first."""

    multiplier: float = 1.0
    """Of the gradient: the clip coefficient over the loss scale, in fp32."""


@dataclass(frozen=True)
class Weights:
    """A flat vector that AdamW trains, with its moments."""

    master: Float[Tensor, " n"]
    """fp32; with `low_bits` the bf16 weights that the model computes with."""

    exp_avg: Float[Tensor, " n"]
    """Moving average of the gradient, fp32 or bf16; computed in fp32."""

    exp_avg_sq: Float[Tensor, " n"]
    """Moving average of its square, in the same type."""

    copy: Float[Tensor, " n"] | None = None
    """bf16 or fp16: receives the new master, rounded as `round_weights` does it."""

    low_bits: Int16[Tensor, " n"] | None = None
    """What `master` in bf16 lacks of fp32, as `split_master` has it."""

    def tensors(self) -> dict[str, Tensor]:
        """Those there are, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@torch.no_grad()
def adamw_(weights: Weights, gradient: Float[Tensor, " n"], step: AdamW) -> None:
    """One step of AdamW, in place.

        g = multiplier * gradient
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p = (1 - lr * weight_decay) * p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    Rounded as PyTorch's fused AdamW rounds it in its SIMD lanes, so that both give the same bits:
    `m` and `v` end in a fused multiply-add each, all else is rounded operation by operation.
    (PyTorch rounds the last few elements of a vector otherwise, this rounds all alike.) Moments in
    bf16 are rounded when they are stored; the step itself has them in fp32. Weights are rounded as
    `round_weights` does it.
    """
    (beta1, beta2), t = step.betas, step.step
    grad = gradient.float() * step.multiplier
    master, low_bits = weights.master, weights.low_bits
    if low_bits is not None:
        master = join_master(master, low_bits)
    exp_avg, exp_avg_sq = weights.exp_avg.float(), weights.exp_avg_sq.float()

    master = master * (1 - step.lr * step.weight_decay)
    exp_avg = exp_avg.lerp(grad, 1 - beta1)
    exp_avg_sq = (exp_avg_sq * beta2).addcmul(grad, grad, value=1 - beta2)
    # By way of fp64, because PyTorch may take the root of fp32 from MKL, which rounds it otherwise
    # than processors do.
    root = exp_avg_sq.double().sqrt().float()
    denominator = root / math.sqrt(1 - beta2**t) + step.eps
    master = master + (-step.lr / (1 - beta1**t)) * exp_avg / denominator

    weights.exp_avg.copy_(exp_avg)
    weights.exp_avg_sq.copy_(exp_avg_sq)
    if weights.copy is not None:
        weights.copy.copy_(round_weights(master, weights.copy.dtype))
    if low_bits is not None:
        master, rest = split_master(master)
        low_bits.copy_(rest)
    weights.master.copy_(master)


def round_weights(masters: Float[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, " n"]:
    """fp32 masters as the weights of `dtype` that a model computes with: the nearest.

    Of two bf16 equally near it is the one of larger magnitude. With ties to even, as in fp16,
    2^16 + 1 masters would have the same even weight, and the 16 bits beside it could not tell them
    apart (`split_master`). Infinity stays, as does NaN.
    """
    if dtype == torch.bfloat16:
        # The last bit takes what is half way, and nothing else, past the middle.
        bits = masters.view(torch.int32)
        moved = bits >> 15
        moved &= 1
        moved |= bits
        masters = moved.view(torch.float32)
    return masters.to(dtype)


def split_master(
    master: Float[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], Int16[Tensor, " n"]]:
    """fp32 as the bf16 of `round_weights` and 16 bits more: its own low ones.

    `join_master` gives it back, to the bit but for the payload of NaN.
    """
    return round_weights(master, torch.bfloat16), master.view(torch.int32).short()


def join_master(weights: Float[Tensor, " n"], low_bits: Int16[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The fp32 that `split_master` took apart."""
    bits = weights.view(torch.int16).int()
    bits <<= 16
    bits += low_bits  # below zero where the weight was rounded up
    return bits.view(torch.float32)


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
    """The same from logits, which `temperature` divides; nats, fp32.

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
