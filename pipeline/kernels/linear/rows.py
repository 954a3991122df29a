"""From how many rows on PyTorch's products round a row as they do among many."""

import functools

import torch
import torch.nn.functional as F

from pipeline.kernels.linear.cpu import probe

FEWEST = (4, 16, 32)
"""Numbers of rows that are tried; the least that will do is taken."""

INPUTS = (256, 288, 1024)
"""Of the products that are compared: the more there are, the more rows it takes."""


@functools.cache
def fewest_rows(dtype: torch.dtype) -> int:
    """The least of `FEWEST` from which on rows come out as among many on this machine.

    Libraries have other kernels for products of few rows. Asked of PyTorch itself, with products
    that come out otherwise in every other order of addition; the least where none does.
    """
    alike = [_come_out_alike(dtype, each) for each in FEWEST]
    return next((each for place, each in enumerate(FEWEST) if all(alike[place:])), FEWEST[0])


@torch.inference_mode()
def _come_out_alike(dtype: torch.dtype, rows: int) -> bool:
    for inputs in INPUTS:
        with torch.device("cpu"):  # another may be the default
            x, weight, _ = (tensor.to(dtype) for tensor in probe(inputs))
        few = F.linear(x[:rows].contiguous(), weight)
        if not torch.equal(few, F.linear(x, weight)[:rows]):
            return False
    return True
