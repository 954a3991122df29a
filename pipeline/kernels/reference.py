"""What the operators compute, in plain PyTorch: the definition that every kernel is held to.

Dimension names: n elements of a flat vector, K targets, d hidden size, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int16
from torch import Tensor

MOMENTS = (torch.float32, torch.bfloat16)
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
COPIES = (torch.bfloat16, torch.float16)

WORD = 0xFFFFFFFF
"""32 bits."""

NO_TARGET = -(2**31)
"""Of PyTorch's loss, which would pass over -100, the usual one, without a word."""

Words = TypeVar("Words", int, Tensor)


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

    overflow: bool = False
    """The gradient is not finite somewhere: nothing is changed."""

    seed: int | None = None
    """Round what is stored in bf16 stochastically, by this seed; None rounds to the nearest."""

    first: int = 0
    """Place of the first element in the whole vector, so that its pieces round as the whole."""


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
    if step.overflow:
        return
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

    random = None if step.seed is None else random_bits(step.seed, step.first, grad)
    store(weights.exp_avg, exp_avg, None if random is None else random[0] >> 16)
    store(weights.exp_avg_sq, exp_avg_sq, None if random is None else random[1])
    if weights.copy is not None:
        if random is None:
            weights.copy.copy_(round_weights(master, weights.copy.dtype))
        else:
            store(weights.copy, master, random[0])
    if low_bits is not None:
        master, rest = split_master(master)
        low_bits.copy_(rest)
    weights.master.copy_(master)


def store(
    out: Float[Tensor, " n"], values: Float[Tensor, " n"], random: Int[Tensor, " n"] | None
) -> None:
    """Round `values` into `out`: to the nearest, or, into bf16, by the low 16 bits of `random`."""
    if random is None or out.dtype != torch.bfloat16:
        out.copy_(values)
    else:
        out.copy_(round_stochastically(values, random))


def round_stochastically(
    values: Float[Tensor, " n"], random: Int[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """fp32 to one of the two bf16 beside it, the nearer one the likelier: right on average.

    The low 16 bits of `random` are added to the bits that bf16 drops. What is not finite stays.
    """
    bits = values.view(torch.int32).long() + (random & 0xFFFF)
    rounded = (bits >> 16 << 16).int().view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def random_bits(seed: int, first: int, like: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """Two words of 32 random bits for each element, from its place in the vector and the seed.

    Places count modulo 2^32.
    """
    place = torch.arange(first, first + len(like), device=like.device) & WORD
    low, high = (mix((mix(place) + key) & WORD) for key in random_keys(seed))
    return low, high


def random_keys(seed: int) -> tuple[int, int]:
    """What tells the two words of a seed apart, and those of another seed from them."""
    return mix(seed & WORD), mix((seed + 0x9E3779B9) & WORD)


def mix(x: Words) -> Words:
    """A bijection of 32-bit words that leaves no bit where it was: lowbias32 (Wellons 2018)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


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
