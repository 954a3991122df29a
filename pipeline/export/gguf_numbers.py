"""The number formats of GGUF files, and what reading them back must give."""

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.export.config import GgufFormat

BLOCK = 32
"""Elements of a q8_0 block: an fp16 scale d and 32 int8 numbers q; a weight is d * q."""

FP16_MAX = 65504.0


def format_of(name: str, shape: tuple[int, ...], wanted: GgufFormat) -> GgufFormat:
    """The format of one tensor of the file: that which is wanted, for matrices that have it.

    Vectors and learned positions are f32, as llama.cpp adds them in f32. A matrix whose rows are no
    multiple of 32 has no q8_0 form and is f16.
    """
    if len(shape) < 2 or name.startswith("position_embd"):
        return "f32"
    return "f16" if wanted == "q8_0" and shape[-1] % BLOCK else wanted


def encode(tensor: Tensor, number_format: GgufFormat, name: str) -> np.ndarray:
    """The bytes of a tensor, uint8 with the tensor's leading dimensions.

    Raises:
        ModelError: a weight is too large for f16.
    """
    whole = tensor.float().contiguous()
    if number_format == "f16" and whole.numel() and float(whole.abs().max()) > FP16_MAX:
        raise ModelError(f"{name} has a weight that f16 can't hold; take --number-format bf16")
    if number_format == "q8_0":
        import gguf

        return gguf.quantize(whole.numpy(), gguf.GGMLQuantizationType.Q8_0)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[number_format]
    return whole.to(dtype).view(torch.uint8).numpy()


def is_read_back(read: np.ndarray, tensor: Tensor, number_format: GgufFormat) -> bool:
    """Whether bytes of a file, uint8 by rows, are those of `tensor` in its format.

    f32, f16 and bf16: equal to the rounded tensor. q8_0: no weight is further away than half a step
    of its block's scale (and the rounding of the scale to fp16), the scale being the largest
    magnitude divided by 127.
    """
    whole = tensor.float().contiguous()
    found = torch.from_numpy(np.array(read, copy=True)).flatten()
    if number_format != "q8_0":
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[number_format]
        return torch.equal(found.view(dtype).reshape(whole.shape), whole.to(dtype))
    blocks = found.reshape(-1, 2 + BLOCK)
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    steps = blocks[:, 2:].contiguous().view(torch.int8).float()
    weights = whole.reshape(-1, BLOCK)
    exact = weights.abs().amax(1, keepdim=True) / 127
    rounding = 2.0**-11 * exact + 2.0**-25  # half a unit of fp16, normal or not
    near = (scale - exact).abs() <= rounding
    error = (scale * steps - weights).abs()
    return bool((near & (error <= 0.5001 * exact + 127 * rounding)).all())
