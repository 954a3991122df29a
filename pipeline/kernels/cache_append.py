"""Write the keys and values of new tokens into a slot cache, on a GPU.

Dimension names: S slots, G heads, M tokens per slot, N new tokens, D and E head sizes.
"""

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels import choice
from pipeline.kernels.gpu import Gpu

LOAD_BYTES = 16
"""Bytes that a thread copies at once."""

WARP, THREADS = 32, 256


class StateArgs(ctypes.Structure):
    """`StateArgs` of cache_append.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("states", "stored")),
        *((name, ctypes.c_int64) for name in ("head_bytes", "token_bytes", "row_bytes")),
    )


class Params(ctypes.Structure):
    """`AppendParams` of cache_append.cu."""

    _fields_ = (
        *((name, StateArgs) for name in ("keys", "values")),
        ("slot_mapping", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_slots", "width")),
        ("num_heads", ctypes.c_int),
    )


MACROS: dict[str, str | int] = {"PARAMS_BYTES": ctypes.sizeof(Params)}
"""Preprocessor macros of the kernel, which supports every dtype and size."""


def reference_append(
    cache: tuple[Float[Tensor, "S G M D"], Float[Tensor, "S G M E"]],
    states: tuple[Float[Tensor, "G N D"], Float[Tensor, "G N E"]],
    slot_mapping: Int[Tensor, " N"],
) -> None:
    """Store the keys and values of each token at index slot * M + position, with PyTorch.

    Tokens with an index outside all slots are skipped. If several have the same index, any of
    them may be stored.
    """
    num_slots, _, width, _ = cache[0].shape
    is_valid = (slot_mapping >= 0) & (slot_mapping < num_slots * width)
    slots, positions = slot_mapping[is_valid] // width, slot_mapping[is_valid] % width
    for stored, new in zip(cache, states, strict=True):
        stored[slots, :, positions] = new.transpose(0, 1)[is_valid]


def find_kernel(
    cache: tuple[Float[Tensor, "S G M D"], Float[Tensor, "S G M E"]],
    states: tuple[Float[Tensor, "G N D"], Float[Tensor, "G N E"]],
) -> Gpu | None:
    """Return the GPU with the kernel for these tensors, or None if PyTorch is used.

    Raises:
        KernelError: kernels are required, and there is none for these tensors.
    """
    device = cache[0].device
    if not choice.use_gpu(device):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states):
        return None
    reason = unsupported_reason(cache, states)
    return choice.resolve(
        "cache updates", reason or choice.load_kernel(device, "cache_append", MACROS)
    )


def unsupported_reason(
    cache: tuple[Float[Tensor, "S G M D"], Float[Tensor, "S G M E"]],
    states: tuple[Float[Tensor, "G N D"], Float[Tensor, "G N E"]],
) -> str | None:
    """Return the reason why the kernel doesn't support these tensors, or None if it does."""
    for name, stored, new in zip(("keys", "values"), cache, states, strict=True):
        if stored.dtype != new.dtype:
            return f"the {name} are {new.dtype}, but the cache is {stored.dtype}"
        if not stored.is_contiguous():
            return "the cache is not contiguous"
        strides = [stride * new.itemsize for stride in new.stride()[:-1]]
        row_bytes = new.shape[-1] * new.itemsize
        offsets = [stored.data_ptr(), new.data_ptr(), row_bytes, *strides]
        if new.stride(-1) != 1 or any(offset % LOAD_BYTES for offset in offsets):
            # Omits the strides, which vary with the number of tokens: reasons are cached.
            return (
                f"heads of size {new.shape[-1]}, {new.dtype}: {name} are not contiguous and aligned"
                f" to {LOAD_BYTES} bytes"
            )
    return None


def append_(
    cache: tuple[Float[Tensor, "S G M D"], Float[Tensor, "S G M E"]],
    states: tuple[Float[Tensor, "G N D"], Float[Tensor, "G N E"]],
    slot_mapping: Int[Tensor, " N"],
    *,
    gpu: Gpu,
) -> None:
    """Compute `reference_append` on a GPU, for tensors that the kernel supports.

    The host doesn't read the indices, so a CUDA graph of the call can be replayed with new ones.
    """
    num_slots, num_heads, width, _ = cache[0].shape
    keys, values = (_make_args(stored, new) for stored, new in zip(cache, states, strict=True))
    params = Params(
        keys=keys,
        values=values,
        slot_mapping=slot_mapping.data_ptr(),
        num_slots=num_slots,
        width=width,
        num_heads=num_heads,
    )
    warps = -(-num_heads * (keys.row_bytes + values.row_bytes) // (LOAD_BYTES * WARP))
    gpu.kernel("cache_append", "cache_append", MACROS)(
        params, grid=(len(slot_mapping), 1, 1), block=(min(THREADS, WARP * warps), 1, 1)
    )


def _make_args(stored: Float[Tensor, "S G M D"], new: Float[Tensor, "G N D"]) -> StateArgs:
    return StateArgs(
        states=new.data_ptr(),
        stored=stored.data_ptr(),
        head_bytes=new.stride(0) * new.itemsize,
        token_bytes=new.stride(1) * new.itemsize,
        row_bytes=new.shape[2] * new.itemsize,
    )
