"""Weights that lie as the allocator lays tensors, wherever they were read from."""

from itertools import chain

from torch import nn

ALIGNMENT = 64
"""Bytes; of PyTorch's memory on CPUs."""


def align_weights(model: nn.Module) -> None:
    """Copy weights in main memory that begin elsewhere, as those in a mapped file do.

    Matrix products add in an order that may depend on where a matrix begins. In a safetensors file
    that follows from the length of its header: without this a frozen model would say something else
    in its last digit than the same weights read otherwise.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
