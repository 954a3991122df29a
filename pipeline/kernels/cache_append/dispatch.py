"""Storing keys and values in a cache of slots, by a kernel where there is one.

See `definition.py` for the dimension names.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels import choice
from pipeline.kernels.cache_append import cuda, definition
from pipeline.kernels.gpu import Gpu


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
    definition.check(cache, states, places)
    if 0 in (states[0].numel(), states[1].numel()):
        return
    gpu = kernel_for(cache, states)
    if gpu is None:
        definition.append_(cache, states, places)
    else:
        cuda.append_(cache, states, places, gpu=gpu)


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
    refusal, defines = cuda.refusal(cache, states), cuda.SPECIALISATION
    return choice.gpu_for("the cache", device, refusal, "cache_append", defines, cuda.self_test)
