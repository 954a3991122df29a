"""How PyTorch's allocator of a GPU's memory lays out what a step asks for."""

import os
from collections.abc import MutableMapping

import torch

OWN_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the environment by which a user configures the allocator."""

EXPANDABLE = "expandable_segments:True"


def use_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Have memory that was freed in pieces serve larger requests; call it before there are any.

    A step of RL alternates between training and generation, whose tensors have other sizes: in
    segments of a fixed size what one leaves free is in pieces that the other can't use.

    Returns:
        False where the environment has settings of the user's own, which stay as they are.
    """
    if any(name in environment for name in OWN_SETTINGS):
        return False
    environment[OWN_SETTINGS[0]] = EXPANDABLE
    if torch.cuda.is_available():  # and has perhaps read the environment already
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE)  # noqa: SLF001
    return True
