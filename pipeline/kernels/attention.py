"""Decode attention, by a kernel where there is one.

The definition is `pipeline.kernels.decode_reference`; see there for the dimension names.
"""

import functools
import logging
import os

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.errors import KernelError
from pipeline.kernels import decode_reference
from pipeline.kernels.cuda import decode
from pipeline.kernels.cuda.gpu import Gpu, gpu_of
from pipeline.kernels.decode_reference import Scores

logger = logging.getLogger(__name__)

SWITCH = "RLHF_PIPELINE_KERNELS"
"""Variable of the environment: off leaves decode attention to PyTorch."""


def decode_attention(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M D"],
    scores: Scores,
    *,
    longest: int,
) -> Float[Tensor, "B H D"]:
    """Attention of the last token of each sequence, as the definition has it.

    `longest` is a number that no length is above: the kernel divides its work by it, and looks at
    no length on the host.

    Raises:
        ValueError: the tensors don't fit one another; the sentence names one.
    """
    check(query, key, value, scores, longest=longest)
    gpu = kernel_for(query, key, value)
    if gpu is None:
        return decode_reference.decode_attention(query, key, value, scores)
    return decode.decode_attention(query, key, value, scores, gpu=gpu, longest=longest)


def kernel_for(
    query: Float[Tensor, "B H D"], key: Float[Tensor, "S G M D"], value: Float[Tensor, "S G M E"]
) -> Gpu | None:
    """The GPU whose kernel takes these tensors; None where there is none, which is said once.

    The cache may have more slots than there are sequences: the first ones are theirs.
    """
    if query.device.type != "cuda" or (torch.is_grad_enabled() and query.requires_grad):
        return None
    if os.environ.get(SWITCH) == "off":
        return None
    reason = decode.refusal(query, key, value)
    if reason is None:
        found = _compiled(query.device, query.dtype, query.shape[1] // key.shape[1], key.shape[3])
        if isinstance(found, Gpu):
            return found
        reason = found
    _say_once(reason)
    return None


@functools.cache
def _compiled(
    device: torch.device, dtype: torch.dtype, heads_per_kv: int, head_size: int
) -> Gpu | str:
    """The GPU with the kernel loaded, or why it can't be had; found out once in a process."""
    try:
        gpu = gpu_of(device)
        shape = decode.Shape(heads_per_kv, head_size, dtype.itemsize)
        gpu.kernel("decode_attention", "decode_attention", decode.specialisation(dtype, shape))
    except KernelError as error:
        return str(error)
    return gpu


@functools.cache
def _say_once(reason: str) -> None:
    logger.info("PyTorch does the work of decode attention's kernel: %s", reason)


def check(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M D"],
    scores: Scores,
    *,
    longest: int,
) -> None:
    """Raise unless the tensors fit one another.

    Raises:
        ValueError: one sentence, which names the tensor.
    """
    if longest > key.shape[2]:
        raise ValueError(f"the cache holds {key.shape[2]} tokens of a sequence, not {longest}")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads can't share {key.shape[1]} heads of keys")
    small = {"lengths": scores.lengths, "starts": scores.starts, "slopes": scores.slopes}
    for name, tensor in ({"key": key, "value": value} | small).items():
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, the query on {query.device}")
    kinds = {"lengths": torch.int32, "starts": torch.int32, "slopes": torch.float32}
    for name, tensor in small.items():
        if tensor is None:
            continue
        count = query.shape[1 if name == "slopes" else 0]
        if (tensor.dtype, tensor.shape) != (kinds[name], (count,)) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be {kinds[name]}, {count} of them side by side, and is"
                f" {tensor.dtype} of shape {tuple(tensor.shape)} and stride {tensor.stride()}"
            )
