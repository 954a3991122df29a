"""AdamW over flat vectors: one pass over memory where there is a kernel for it.

The definition, with all options, is `pipeline.kernels.reference.adamw_`; every kernel, and PyTorch
on a CPU, gives the bits that it has there. PyTorch on a GPU rounds a division by a number of the
host otherwise, in the last bit.
"""

import functools

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.adamw import adamw

from pipeline.config import Kernels
from pipeline.errors import KernelError
from pipeline.kernels import reference
from pipeline.kernels.adam_vectors import check
from pipeline.kernels.choice import settle
from pipeline.kernels.cpu import adam as cpu
from pipeline.kernels.cpu.build import Built, NotBuiltError
from pipeline.kernels.cuda import adam as cuda
from pipeline.kernels.cuda.check import is_right
from pipeline.kernels.cuda.gpu import Gpu, gpu_of
from pipeline.kernels.reference import AdamW, Weights

CHUNK = 65536
"""Elements that PyTorch steps at once: what it makes on the way fits into a core's cache."""

LINE = 16
"""PyTorch's fused AdamW rounds all elements alike in vectors of a multiple of so many."""


def adamw_(
    weights: Weights, gradient: Float[Tensor, " n"], step: AdamW, *, kernels: Kernels = "auto"
) -> None:
    """One step of AdamW, in place, as `reference.adamw_` defines it.

    All vectors are contiguous, of one length, on one device, and share no memory. The gradient is
    fp32, bf16 or fp16.

    Raises:
        ValueError: they are not; the sentence names the vector.
        KernelError: `kernels` is required, and there is none for them. (With auto PyTorch does the
            work then, with off it always does, on a CPU to the same bits.)
    """
    check(weights, gradient)
    if gradient.numel() == 0:
        return
    found = _find(weights, gradient) if kernels != "off" else NotBuiltError("kernels is off")
    if isinstance(found, Built):
        cpu.run(found, weights, gradient, step, threads=torch.get_num_threads())
        return
    if isinstance(found, Gpu):
        cuda.run(found, weights, gradient, step)
        return
    if kernels != "off":
        settle("AdamW", str(found), kernels)
    _step_in_chunks(weights, gradient, step)


def prepare(
    device: torch.device, *, copy: torch.dtype | None, split: bool = False, kernels: Kernels
) -> bool:
    """Have the kernel for fp32 vectors on `device` ready before the first step.

    Args:
        device: of the vectors.
        copy: the type of the rounded copy, if there is one.
        split: whether the masters are bf16 weights and 16 bits more.
        kernels: off does nothing.

    Returns:
        Whether it is.

    Raises:
        KernelError: it is required and can't be had.
    """
    if kernels == "off":
        return False
    found = find(device, copy=copy, split=split)
    if isinstance(found, NotBuiltError):
        settle("AdamW", str(found), kernels)
        return False
    return True


def find(
    device: torch.device, *, copy: torch.dtype | None, split: bool = False
) -> Built | Gpu | NotBuiltError:
    """What steps fp32 vectors on the CPU or a GPU, built if need be, or why nothing does."""
    if device.type == "cuda":
        return _on_gpu(device, (torch.float32, torch.float32, copy, split))
    return cpu.library(cpu.Variant(torch.float32, torch.float32, copy, split))


def _find(weights: Weights, gradient: Tensor) -> Built | Gpu | NotBuiltError:
    device = gradient.device
    if device.type not in ("cpu", "cuda"):
        return NotBuiltError(f"there is none for {device.type}")
    tensors = [gradient, *weights.tensors().values()]
    if any(tensor.data_ptr() % tensor.element_size() for tensor in tensors):
        return NotBuiltError("a vector begins between the places of two elements in memory")
    if device.type == "cuda":
        return _on_gpu(device, cuda.kind_of(weights, gradient))
    return cpu.library(cpu.Variant.of(weights, gradient))


@functools.cache
def _on_gpu(device: torch.device, kind: cuda.Kind) -> Gpu | NotBuiltError:
    """The GPU, with the kernel loaded and found to be right; found out once in a process."""
    macros = cuda.specialisation(kind)
    try:
        gpu = gpu_of(device)
        gpu.kernel("adamw", "adamw", macros)
        if not is_right(gpu, "adamw", macros):
            return NotBuiltError("adamw computes something else than its definition on this GPU")
    except KernelError as error:
        return NotBuiltError(str(error))
    return gpu


def _step_in_chunks(weights: Weights, gradient: Tensor, step: AdamW) -> None:
    """PyTorch's own operations, on a piece at a time that fits into a core's cache."""
    tensors = weights.tensors() | {"gradient": gradient}
    on_cpu, numel = gradient.device.type == "cpu", gradient.numel()
    fused = on_cpu and weights.exp_avg.dtype == torch.float32
    # PyTorch's fused class takes whole lines, the definition what is left.
    whole = numel // LINE * LINE if fused else 0
    size = CHUNK if on_cpu else numel
    for start in [*range(0, whole, size), *range(whole, numel, size)]:
        end = min(start + size, whole if start < whole else numel)
        part = {name: tensor[start:end] for name, tensor in tensors.items()}
        piece = part.pop("gradient")
        if start < whole:
            _step_fused(Weights(**part), piece, step)
        else:
            reference.adamw_(Weights(**part), piece, step)


def _step_fused(weights: Weights, gradient: Tensor, step: AdamW) -> None:
    master = weights.master
    if weights.low_bits is not None:
        master = reference.join_master(master, weights.low_bits)
    adamw(
        [master],
        [gradient.float() * step.multiplier],
        [weights.exp_avg],
        [weights.exp_avg_sq],
        [],
        [torch.tensor(float(step.step - 1))],
        fused=True,
        amsgrad=False,
        beta1=step.betas[0],
        beta2=step.betas[1],
        lr=step.lr,
        weight_decay=step.weight_decay,
        eps=step.eps,
        maximize=False,
    )
    if weights.copy is not None:
        weights.copy.copy_(reference.round_weights(master, weights.copy.dtype))
    if weights.low_bits is not None:
        rounded, low_bits = reference.split_master(master)
        weights.master.copy_(rounded)
        weights.low_bits.copy_(low_bits)
