"""Decode attention, by a kernel where there is one.

See `definition.py` for the dimension names.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.kernels import choice
from pipeline.kernels.build import Built
from pipeline.kernels.decode_attention import cpu, cuda, definition
from pipeline.kernels.decode_attention.definition import Scores
from pipeline.kernels.gpu import Gpu


def decode_attention(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M D"],
    scores: Scores,
    *,
    longest: int,
    out: Float[Tensor, "B H D"] | None = None,
) -> Float[Tensor, "B H D"]:
    """Attention of the last token of each sequence, as the definition has it.

    `longest` is a number that no length is above: the kernel divides its work by it, and looks at
    no length on the host; one beyond the cache sees what the cache holds. The result is written
    into `out` if that is given: contiguous memory.

    Raises:
        KernelError: kernels are required, and there is none for these.
    """
    if query.numel() == 0:
        return torch.empty_like(query) if out is None else out
    kernel = kernel_for(query, key, value)
    if isinstance(kernel, Gpu):
        return cuda.decode_attention(
            query, key, value, scores, gpu=kernel, longest=longest, out=out
        )
    if kernel is not None:
        out = query.new_empty(query.shape) if out is None else out
        call = cpu.prepare(
            query,
            key,
            value,
            out,
            scaling=scores.scaling,
            sliding_window=scores.sliding_window,
            built=kernel,
        )
        call(scores.lengths)
        return out
    result = definition.decode_attention(query, key, value, scores)
    return result if out is None else out.copy_(result)


def sequence_attention(
    query: Float[Tensor, "T H D"],
    key: Float[Tensor, "1 G M D"],
    value: Float[Tensor, "1 G M D"],
    *,
    first: int,
    scaling: float,
    sliding_window: int | None,
    out: Float[Tensor, "T H D"],
) -> bool:
    """Attention of T tokens of one sequence, from place `first` on, by the CPU's kernel.

    Written into `out`, contiguous memory; False where there is no such kernel for these.

    Raises:
        KernelError: kernels are required, and there is none for these.
    """
    built = kernel_for(query, key, value)
    if not isinstance(built, Built) or not out.is_contiguous():
        return False
    lengths = torch.arange(first + 1, first + 1 + len(query), dtype=torch.int32)
    call = cpu.prepare(
        query,
        key,
        value,
        out,
        scaling=scaling,
        sliding_window=sliding_window,
        built=built,
        one_sequence=True,
    )
    call(lengths)
    return True


def prepare(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M D"],
    out: Float[Tensor, "B H D"],
    *,
    scaling: float,
    sliding_window: int | None,
) -> cpu.Prepared | None:
    """The CPU's kernel, ready to be called as often as one likes on this memory.

    None where there is no such kernel for these.

    Raises:
        KernelError: kernels are required, and there is none for these.
    """
    built = kernel_for(query, key, value)
    if not isinstance(built, Built) or not out.is_contiguous():
        return None
    return cpu.prepare(
        query, key, value, out, scaling=scaling, sliding_window=sliding_window, built=built
    )


def kernel_for(
    query: Float[Tensor, "B H D"], key: Float[Tensor, "S G M D"], value: Float[Tensor, "S G M E"]
) -> Gpu | Built | None:
    """The kernel that takes these tensors; None where PyTorch is to do the work.

    The cache may have more slots than there are sequences: the first ones are theirs.

    Raises:
        KernelError: kernels are required, and there is none for these.
    """
    if torch.is_grad_enabled() and query.requires_grad:
        return None
    if not choice.wanted(query.device):
        return _on_cpu(query, key, value) if query.device.type == "cpu" else None
    refusal = cuda.refusal(query, key, value)
    defines: dict[str, str | int] = {}
    if refusal is None:
        shape = cuda.Shape(query.shape[1] // key.shape[1], key.shape[3], query.dtype.itemsize)
        defines = cuda.specialisation(query.dtype, shape)
    return choice.gpu_for(
        "attention", query.device, refusal, "decode_attention", defines, cuda.self_test
    )


def _on_cpu(
    query: Float[Tensor, "B H D"], key: Float[Tensor, "S G M D"], value: Float[Tensor, "S G M E"]
) -> Built | None:
    kernels = choice.kernel_mode()
    if kernels == "off":
        return None
    found = next(cpu.refusals(query, key, value), None) or cpu.library(query.dtype)
    if isinstance(found, Built):
        return found
    choice.settle("attention", str(found), kernels)
    return None
