"""Storing keys and values in a cache of slots, by a kernel where there is one.

The definition is `pipeline.kernels.append_reference`; see there for the dimension names.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels import append_reference, choice
from pipeline.kernels.cuda import append
from pipeline.kernels.cuda.gpu import Gpu


def append_(
    cache: tuple[Float[Tensor, "S G M D"], Float[Tensor, "S G M E"]],
    states: tuple[Float[Tensor, "G N D"], Float[Tensor, "G N E"]],
    places: Int[Tensor, " N"],
) -> None:
    """Store the keys and values of N tokens in their slots, as the definition has it.

    Raises:
        ValueError: the tensors don't fit one another; the sentence names one.
        KernelError: kernels are required, and there is none for these.
    """
    check(cache, states, places)
    if 0 in (states[0].numel(), states[1].numel()):
        return
    gpu = kernel_for(cache, states)
    if gpu is None:
        append_reference.append_(cache, states, places)
    else:
        append.append_(cache, states, places, gpu=gpu)


def kernel_for(
    cache: tuple[Float[Tensor, "S G M D"], Float[Tensor, "S G M E"]],
    states: tuple[Float[Tensor, "G N D"], Float[Tensor, "G N E"]],
) -> Gpu | None:
    """The GPU whose kernel takes these tensors; None where PyTorch is to do the work.

    Raises:
        KernelError: kernels are required, and there is none for these.
    """
    device = cache[0].device
    if not choice.wanted(device):
        return None
    if torch.is_grad_enabled() and any(each.requires_grad for each in states):
        return None
    refusal = append.refusal(cache, states)
    return choice.gpu_for("the cache", device, refusal, "append", append.SPECIALISATION)


def check(
    cache: tuple[Tensor, Tensor], states: tuple[Tensor, Tensor], places: Int[Tensor, " N"]
) -> None:
    """Raise unless the tensors fit one another.

    Raises:
        ValueError: one sentence, which names the tensor.
    """
    keys = cache[0]
    if places.ndim != 1 or places.dtype != torch.int64 or not places.is_contiguous():
        raise ValueError(
            f"places must be int64, side by side, and are {places.dtype} of shape"
            f" {tuple(places.shape)} and stride {places.stride()}"
        )
    for name, stored, new in zip(("keys", "values"), cache, states, strict=True):
        if stored.ndim != 4 or stored.shape[:3] != keys.shape[:3] or 0 in stored.shape:
            raise ValueError(
                f"a cache holds keys and values of (slots, heads, tokens, size), none of them 0,"
                f" and its {name} have shape {tuple(stored.shape)} beside {tuple(keys.shape)}"
            )
        expected = (stored.shape[1], len(places), stored.shape[3])
        if tuple(new.shape) != expected:
            raise ValueError(f"new {name} must have shape {expected}, not {tuple(new.shape)}")
        for other in (new, places):
            if other.device != stored.device:
                raise ValueError(
                    f"the cache is on {stored.device}, new {name} or places on {other.device}"
                )
        if new.dtype != stored.dtype:
            raise ValueError(f"the cache has {name} of {stored.dtype}, new ones are {new.dtype}")
