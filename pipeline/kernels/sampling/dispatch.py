"""Drawing the next token of each sequence, by a kernel where there is one.

See `definition.py` for the dimension names. A GPU's kernel takes logits; a CPU's what remains once
there are log-probabilities.
"""

import numpy as np
import torch
from jaxtyping import Float, Int, UInt64
from torch import Tensor

from pipeline.kernels import choice
from pipeline.kernels.build import Built
from pipeline.kernels.gpu import Gpu
from pipeline.kernels.sampling import cpu, cuda, definition
from pipeline.kernels.sampling.definition import Draw


def sample(
    logits: Float[Tensor, "B V"],
    keys: Int[Tensor, " B"],
    positions: Int[Tensor, " B"],
    draw: Draw,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Tokens, and their log-probabilities before any was cut off, as the definition has it.

    Raises:
        KernelError: kernels are required, and there is none for these.
    """
    gpu = kernel_for(logits) if len(logits) else None
    if gpu is None:
        return definition.sample(logits, keys, positions, draw)
    return cuda.sample(logits, keys, positions, draw, gpu=gpu)


def kernel_for(logits: Float[Tensor, "B V"], reason: str | None = None) -> Gpu | None:
    """The GPU whose kernel takes these logits; None where PyTorch is to do the work.

    `reason` is what else keeps the kernel from it, in a clause.

    Raises:
        KernelError: kernels are required, and there is none for these.
    """
    if not choice.wanted(logits.device):
        return None
    refusal, defines = reason or cuda.refusal(logits), cuda.specialisation(logits.dtype)
    return choice.gpu_for("sampling", logits.device, refusal, "sampling", defines, cuda.self_test)


def draw(
    logprobs: Float[Tensor, "B V"],
    keys: UInt64[np.ndarray, " B"],
    positions: UInt64[np.ndarray, " B"],
    *,
    seed: int,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]] | None:
    """Tokens in proportion to their probability, and their log-probabilities.

    For log-probabilities of a CPU of which none is cut off: those that training computes are to be
    reported, bit for bit. None where PyTorch is to do the work.

    Raises:
        KernelError: kernels are required, and there is none.
    """
    kernels = choice.kernel_mode()
    if logprobs.device.type != "cpu" or kernels == "off":
        return None
    built = cpu.library()
    if not isinstance(built, Built):
        choice.settle("sampling", str(built), kernels)
        return None
    rows = logprobs.contiguous()
    rows = rows.clone() if rows.data_ptr() % rows.element_size() else rows
    return cpu.draw(rows, keys, positions, seed=seed, built=built)


def least_of(weights: Float[Tensor, "B V"], top_k: int) -> Float[Tensor, "B 1"] | None:
    """The least of the `top_k` largest weights of each row; None where PyTorch is to do the work.

    Raises:
        KernelError: kernels are required, and there is none.
    """
    return _cut(weights, weights.new_empty(len(weights), 1), top_k=top_k, top_p=1.0)


def nucleus(weights: Float[Tensor, "B V"], top_p: float) -> Float[Tensor, "B V"] | None:
    """Weights with 0 for all but the likeliest that reach `top_p`, to the bits of the sorted sum.

    None where PyTorch is to do the work.

    Raises:
        KernelError: kernels are required, and there is none.
    """
    return _cut(weights, torch.empty_like(weights), top_k=0, top_p=top_p)


def _cut(weights: Tensor, out: Tensor, *, top_k: int, top_p: float) -> Tensor | None:
    kernels = choice.kernel_mode()
    takes = weights.device.type == "cpu" and weights.dtype is torch.float64
    if kernels == "off" or not takes or not weights.is_contiguous() or not weights.numel():
        return None
    built = cpu.cut_library()
    if not isinstance(built, Built):
        choice.settle("sampling", str(built), kernels)
        return None
    return out if cpu.cut(weights, out, top_k=top_k, top_p=top_p, built=built) else None
