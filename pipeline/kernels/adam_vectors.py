"""Which vectors AdamW steps, on any device."""

import itertools

import torch
from torch import Tensor

from pipeline.kernels.reference import COPIES, GRADIENTS, MOMENTS, Weights


def check(weights: Weights, gradient: Tensor) -> None:
    """Raise unless the vectors can be stepped.

    Raises:
        ValueError: one sentence, which names the vector.
    """
    tensors = {"gradient": gradient} | weights.tensors()
    split = weights.low_bits is not None
    for name, tensor in tensors.items():
        if (tensor.shape, tensor.device) != (gradient.shape, gradient.device) or tensor.ndim != 1:
            raise ValueError(
                f"AdamW steps flat vectors of one length on one device: {name} has shape"
                f" {tuple(tensor.shape)} on {tensor.device}, the gradient has"
                f" {tuple(gradient.shape)} on {gradient.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"AdamW steps contiguous vectors, and {name} has stride {tensor.stride()}"
            )
    allowed = {
        "master": (torch.bfloat16,) if split else (torch.float32,),
        "exp_avg": MOMENTS,
        "exp_avg_sq": (weights.exp_avg.dtype,),
        "copy": () if split else COPIES,
        "low_bits": (torch.int16,),
        "gradient": GRADIENTS,
    }
    for name, tensor in tensors.items():
        if tensor.dtype not in allowed[name]:
            takes = " or ".join(str(dtype) for dtype in allowed[name]) or "none"
            raise ValueError(f"AdamW's {name} must be {takes} here, not {tensor.dtype}")
    if gradient.numel() == 0 or gradient.device.type == "meta":
        return
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"AdamW's vectors must lie apart: {first} and {second} share memory")
