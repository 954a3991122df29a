"""AdamW over a flat vector, in plain PyTorch: the definition that every kernel is held to.

Dimension names: n elements of a flat vector, b blocks of its moments in 8 bits.
"""

import itertools
import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int16, Shaped, UInt8
from torch import Tensor

from pipeline.kernels.adamw.eight_bits import (
    AVERAGE,
    BLOCK,
    SQUARE,
    blocks,
    decode,
    encode,
    noise_of,
)

MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
COPIES = (torch.bfloat16, torch.float16)


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

    exp_avg: Shaped[Tensor, " n"]
    """Moving average of the gradient, fp32, bf16 or codes of 8 bits; computed in fp32."""

    exp_avg_sq: Shaped[Tensor, " n"]
    """Moving average of its square, in the same type."""

    copy: Float[Tensor, " n"] | None = None
    """bf16 or fp16: receives the new master, rounded as `round_weights` does it."""

    low_bits: Int16[Tensor, " n"] | None = None
    """What `master` in bf16 lacks of fp32, as `split_master` has it."""

    exp_avg_exponents: UInt8[Tensor, " b"] | None = field(default=None, kw_only=True)
    """Of the blocks of `exp_avg`, where moments are codes (`eight_bits.py`)."""

    exp_avg_sq_exponents: UInt8[Tensor, " b"] | None = field(default=None, kw_only=True)
    """Exponents of the blocks of `exp_avg_sq`, likewise."""

    def tensors(self) -> dict[str, Tensor]:
        """The vectors that are there, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def part(self, place: slice) -> "Weights":
        """Some of the elements, whole blocks where moments are codes, but for the last."""
        return Weights(
            **{name: value[entries(name, place)] for name, value in self.tensors().items()}
        )


EXPONENTS = ("exp_avg_exponents", "exp_avg_sq_exponents")
"""The vectors with an entry for each block."""


def grain(name: str) -> int:
    """Elements for each entry of the vector of this name."""
    return BLOCK if name in EXPONENTS else 1


def entries(name: str, place: slice) -> slice:
    """Where the vector of this name has what belongs to some elements, which begin a block."""
    return slice(place.start // grain(name), -(-place.stop // grain(name)))


def new_moments(like: Float[Tensor, " n"], dtype: torch.dtype) -> dict[str, Tensor]:
    """Moments of 0 for a vector, by the names of `Weights`."""
    found = {name: torch.zeros_like(like, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    if dtype == torch.uint8:
        size = blocks(like.numel())
        found |= {name: like.new_zeros(size, dtype=torch.uint8) for name in EXPONENTS}
    return found


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A flat vector to update, with its gradient and what of the optimizer is its own."""

    weights: Weights
    gradient: Float[Tensor, " n"]
    lr: float
    """Factor of the step's learning rate for this shard."""

    weight_decay: float


def check(weights: Weights, gradient: Tensor) -> None:
    """Raise unless the vectors can be stepped.

    Raises:
        ValueError: one sentence, which names the vector.
    """
    tensors = {"gradient": gradient} | weights.tensors()
    split = weights.low_bits is not None
    _check_blocks(weights, gradient)
    for name, tensor in tensors.items():
        if name in EXPONENTS:
            continue
        if (tensor.shape, tensor.device) != (gradient.shape, gradient.device) or tensor.ndim != 1:
            raise ValueError(
                f"AdamW steps flat vectors of one length on one device: {name} has shape"
                f" {tuple(tensor.shape)} on {tensor.device}, the gradient has"
                f" {tuple(gradient.shape)} on {gradient.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"AdamW steps contiguous vectors, and {name} has stride {tensor.stride()}"
            )
    allowed = {
        "master": (torch.bfloat16,) if split else (torch.float32,),
        "exp_avg": MOMENTS,
        "exp_avg_sq": (weights.exp_avg.dtype,),
        "copy": () if split else COPIES,
        "low_bits": (torch.int16,),
        "gradient": GRADIENTS,
        **dict.fromkeys(EXPONENTS, (torch.uint8,)),
    }
    for name, tensor in tensors.items():
        if tensor.dtype not in allowed[name]:
            takes = " or ".join(str(dtype) for dtype in allowed[name]) or "none"
            raise ValueError(f"AdamW's {name} must be {takes} here, not {tensor.dtype}")
    if gradient.numel() == 0 or gradient.device.type == "meta":
        return
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"AdamW's vectors must lie apart: {first} and {second} share memory")


def _check_blocks(weights: Weights, gradient: Tensor) -> None:
    in_codes = weights.exp_avg.dtype == torch.uint8
    shape = (blocks(gradient.numel()),)
    for name in EXPONENTS:
        tensor = weights.tensors().get(name)
        if (tensor is not None) != in_codes:
            raise ValueError(
                f"AdamW's {name} must be there if the moments are torch.uint8, and only then"
            )
        if tensor is not None and (tensor.shape, tensor.device) != (shape, gradient.device):
            raise ValueError(
                f"AdamW's {name} has shape {tuple(tensor.shape)} on {tensor.device}, and the"
                f" blocks of {BLOCK} elements need {shape} on {gradient.device}"
            )


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
    bf16, and in 8 bits as `eight_bits.py` has it, are rounded when they are stored; the step itself
    has them in fp32. Weights are rounded as `round_weights` does it.
    """
    (beta1, beta2), t = step.betas, step.step
    grad = gradient.float() * step.multiplier
    master, low_bits = weights.master, weights.low_bits
    if low_bits is not None:
        master = join_master(master, low_bits)
    exp_avg, exp_avg_sq = read_moments(weights)

    master = master * (1 - step.lr * step.weight_decay)
    exp_avg = exp_avg.lerp(grad, 1 - beta1)
    exp_avg_sq = (exp_avg_sq * beta2).addcmul(grad, grad, value=1 - beta2)
    # By way of fp64, because PyTorch may take the root of fp32 from MKL, which rounds it otherwise
    # than processors do.
    root = exp_avg_sq.double().sqrt().float()
    denominator = root / math.sqrt(1 - beta2**t) + step.eps
    master = master + (-step.lr / (1 - beta1**t)) * exp_avg / denominator

    write_moments(weights, exp_avg, exp_avg_sq)
    if weights.copy is not None:
        weights.copy.copy_(round_weights(master, weights.copy.dtype))
    if low_bits is not None:
        master, rest = split_master(master)
        low_bits.copy_(rest)
    weights.master.copy_(master)


def read_moments(weights: Weights) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Both moments in fp32."""
    if weights.exp_avg_exponents is None or weights.exp_avg_sq_exponents is None:
        return weights.exp_avg.float(), weights.exp_avg_sq.float()
    return (
        decode(weights.exp_avg, weights.exp_avg_exponents, AVERAGE),
        decode(weights.exp_avg_sq, weights.exp_avg_sq_exponents, SQUARE),
    )


def write_moments(
    weights: Weights, exp_avg: Float[Tensor, " n"], exp_avg_sq: Float[Tensor, " n"]
) -> None:
    """Store both moments, rounded as they are kept."""
    if weights.exp_avg_exponents is None or weights.exp_avg_sq_exponents is None:
        weights.exp_avg.copy_(exp_avg)
        weights.exp_avg_sq.copy_(exp_avg_sq)
        return
    noise = noise_of(exp_avg, exp_avg_sq)
    codes, exponents = encode(exp_avg, noise, AVERAGE)
    weights.exp_avg.copy_(codes)
    weights.exp_avg_exponents.copy_(exponents)
    codes, exponents = encode(exp_avg_sq, noise, SQUARE)
    weights.exp_avg_sq.copy_(codes)
    weights.exp_avg_sq_exponents.copy_(exponents)


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
