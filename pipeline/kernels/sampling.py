"""Drawing the next token of each sequence, by a kernel where there is one.

The definition is `pipeline.kernels.sampling_reference`; see there for the dimension names. A GPU's
kernel takes logits; a CPU's what remains once there are log-probabilities.
"""

import numpy as np
import torch
from jaxtyping import Float, Int, UInt64
from torch import Tensor

from pipeline.kernels import choice, sampling_reference
from pipeline.kernels.cpu import draw as cpu
from pipeline.kernels.cpu.build import Built
from pipeline.kernels.cuda import sample as cuda
from pipeline.kernels.cuda.gpu import Gpu
from pipeline.kernels.sampling_reference import Draw


def sample(
    logits: Float[Tensor, "B V"],
    keys: Int[Tensor, " B"],
    positions: Int[Tensor, " B"],
    draw: Draw,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Tokens, and their log-probabilities before any was cut off, as the definition has it.

    Raises:
        ValueError: the tensors don't fit one another, or a setting is out of range.
        KernelError: kernels are required, and there is none for these.
    """
    check(logits, keys, positions, draw)
    gpu = kernel_for(logits) if len(logits) else None
    if gpu is None:
        return sampling_reference.sample(logits, keys, positions, draw)
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
    return choice.gpu_for("sampling", logits.device, refusal, "sample", defines)


def draw(
    logprobs: Float[Tensor, "B V"],
    keys: UInt64[np.ndarray, " B"],
    positions: UInt64[np.ndarray, " B"],
    *,
    seed: int,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]] | None:
    """Tokens in proportion to their probability, and their log-probabilities.

    For log-probabilities of a CPU of which none is cut off: those that training computes are to be
    reported, to the bit. None where PyTorch is to do the work.

    Raises:
        ValueError: the tensors don't fit one another; the sentence names one.
        KernelError: kernels are required, and there is none.
    """
    check_draw(logprobs, keys, positions)
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


def check_draw(logprobs: Tensor, keys: np.ndarray, positions: np.ndarray) -> None:
    """Raise unless the numbers fit one another.

    Raises:
        ValueError: one sentence, which names what does not.
    """
    if logprobs.ndim != 2 or logprobs.shape[1] == 0 or logprobs.dtype != torch.float32:
        raise ValueError(
            f"log-probabilities must be torch.float32 of (sequences, words), and are"
            f" {logprobs.dtype} of shape {tuple(logprobs.shape)}"
        )
    for name, words in (("keys", keys), ("positions", positions)):
        fits = words.dtype == np.uint64 and words.shape == logprobs.shape[:1]
        if not fits or not words.flags.c_contiguous:
            raise ValueError(
                f"{name} must be uint64, {len(logprobs)} of them side by side, and is"
                f" {words.dtype} of shape {words.shape} and strides {words.strides}"
            )


def check(logits: Tensor, keys: Tensor, positions: Tensor, draw: Draw) -> None:
    """Raise unless the tensors fit one another and the settings are in range.

    Raises:
        ValueError: one sentence, which names what does not.
    """
    if logits.ndim != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be numbers of (sequences, words), and are {logits.dtype} of shape"
            f" {tuple(logits.shape)}"
        )
    for name, tensor in (("keys", keys), ("positions", positions)):
        fits = tensor.dtype == torch.int64 and tensor.shape == logits.shape[:1]
        if not fits or not tensor.is_contiguous() or tensor.device != logits.device:
            raise ValueError(
                f"{name} must be torch.int64, {len(logits)} of them side by side on"
                f" {logits.device}, and is {tensor.dtype} of shape {tuple(tensor.shape)} and stride"
                f" {tensor.stride()} on {tensor.device}"
            )
    if not (draw.temperature >= 0 and draw.top_p > 0 and 0 <= draw.min_p <= 1):
        raise ValueError(f"a temperature, top_p or min_p is out of range: {draw}")
    if draw.top_k is not None and draw.top_k < 1:
        raise ValueError(f"top_k must be above 0: {draw.top_k}")
