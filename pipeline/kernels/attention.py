"""Decode attention, by a kernel where there is one.

The definition is `pipeline.kernels.decode_reference`; see there for the dimension names.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.kernels import choice, decode_reference
from pipeline.kernels.cpu import decode as cpu
from pipeline.kernels.cpu.build import Built
from pipeline.kernels.cuda import decode
from pipeline.kernels.cuda.gpu import Gpu
from pipeline.kernels.decode_reference import Scores


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
        ValueError: the tensors don't fit one another; the sentence names one.
        KernelError: kernels are required, and there is none for these.
    """
    check(query, key, value, scores, longest=longest, out=out)
    if query.numel() == 0:
        return torch.empty_like(query) if out is None else out
    kernel = kernel_for(query, key, value)
    if isinstance(kernel, Gpu):
        return decode.decode_attention(
            query, key, value, scores, gpu=kernel, longest=longest, out=out
        )
    if kernel is not None:
        return cpu.decode_attention(
            query,
            key,
            value,
            scores.lengths,
            scaling=scores.scaling,
            sliding_window=scores.sliding_window,
            built=kernel,
            out=out,
        )
    result = decode_reference.decode_attention(query, key, value, scores)
    return result if out is None else out.copy_(result)


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
    refusal = decode.refusal(query, key, value)
    defines: dict[str, str | int] = {}
    if refusal is None:
        shape = decode.Shape(query.shape[1] // key.shape[1], key.shape[3], query.dtype.itemsize)
        defines = decode.specialisation(query.dtype, shape)
    return choice.gpu_for("attention", query.device, refusal, "decode_attention", defines)


def _on_cpu(
    query: Float[Tensor, "B H D"], key: Float[Tensor, "S G M D"], value: Float[Tensor, "S G M E"]
) -> Built | None:
    kernels = choice.kernel_mode()
    if kernels == "off":
        return None
    found = next(cpu.refusals(query, key, value), None) or cpu.kernel(query.dtype, query.shape[2])
    if isinstance(found, Built):
        return found
    choice.settle("attention", found, kernels)
    return None


def check(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M D"],
    scores: Scores,
    *,
    longest: int,
    out: Float[Tensor, "B H D"] | None = None,
) -> None:
    """Raise unless the tensors fit one another.

    Raises:
        ValueError: one sentence, which names the tensor.
    """
    _check_shapes(query, key, value)
    if scores.sliding_window is not None and scores.sliding_window < 1:
        raise ValueError(f"a sliding window has a token at least, not {scores.sliding_window}")
    if longest > key.shape[2]:
        raise ValueError(f"the cache holds {key.shape[2]} tokens of a sequence, not {longest}")
    if out is not None:
        shape, found = (*query.shape[:2], value.shape[3]), (out.dtype, out.device)
        if out.shape != shape or found != (query.dtype, query.device) or not out.is_contiguous():
            raise ValueError(
                f"out must be {query.dtype} on {query.device} of shape {shape}, side by side, and"
                f" is {out.dtype} on {out.device} of shape {tuple(out.shape)} and stride"
                f" {out.stride()}"
            )
    lengths, count = scores.lengths, query.shape[0]
    for name, tensor in (("key", key), ("value", value), ("lengths", lengths)):
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, the query on {query.device}")
    if (lengths.dtype, lengths.shape) != (torch.int32, (count,)) or not lengths.is_contiguous():
        raise ValueError(
            f"lengths must be torch.int32, {count} of them side by side, and is {lengths.dtype} of"
            f" shape {tuple(lengths.shape)} and stride {lengths.stride()}"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor, ndim in (("query", query, 3), ("key", key, 4), ("value", value, 4)):
        if tensor.ndim != ndim or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be numbers in {ndim} dimensions, and is {tensor.dtype} of shape"
                f" {tuple(tensor.shape)}"
            )
    if key.shape[:3] != value.shape[:3] or key.shape[0] != query.shape[0]:
        raise ValueError(
            f"keys and values must be of the same {query.shape[0]} sequences as the query, and have"
            f" shapes {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if key.shape[3] != query.shape[2]:
        raise ValueError(f"keys have {key.shape[3]} numbers a head, the query {query.shape[2]}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads can't share {key.shape[1]} heads of keys")
