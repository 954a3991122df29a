"""Weights in 4 or 8 bits: blocks of 64 numbers, each block with a scale.

NF4 is that of Dettmers et al. 2023 (QLoRA), section 3 and appendix E: the 16 codes are quantiles of
a normal distribution, and a weight is its code times the largest magnitude of its block. int8 has
255 equal steps instead. A flattened weight is cut into blocks in order; the last one is filled up
with zeros.

With `double` the scales themselves are stored in 8 bits, by groups of 256: 255 equal steps between
the smallest and the largest of a group. QLoRA subtracts a mean of the whole matrix instead, which a
process with a part of it doesn't know.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

BLOCK = 64
"""Weights that share a scale."""

GROUP = 256
"""Scales that share a range, where they are quantized as well."""

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What the 4-bit codes 0 to 15 stand for (QLoRA, appendix E)."""

INT8_STEPS = 127
"""Steps of an 8-bit code on either side of zero."""

SCALES = ("scales", "scale_codes", "scale_ranges")
"""Names of the vectors beside the codes."""

AT_ONCE = 2**20
"""Weights that are taken apart or put together in one go; whole blocks."""

Packed = Mapping[str, Tensor]
"""The flat vectors that stand for a weight, by name."""


@dataclass(frozen=True)
class Form:
    """How weights are stored."""

    codes: Literal["nf4", "int8"]
    double: bool = False
    """Whether scales are quantized too."""


@dataclass(frozen=True)
class Vector:
    """One of the vectors that stand for a weight."""

    dtype: torch.dtype

    weights: int
    """Weights of a block."""

    per_block: int
    """Elements of the vector for each block."""

    together: int
    """Weights that have to be read to compute an element: whole stretches of that many."""

    @property
    def grain(self) -> int:
        """Weights that one element of the vector stands for."""
        return self.weights // self.per_block

    def numel(self, weights: int) -> int:
        """Elements for that many weights."""
        return -(-weights // self.weights) * self.per_block

    def stretch(self, start: int, stop: int) -> tuple[int, int, int]:
        """Where the weights of elements `start` to `stop` begin and end, and the first's element.

        The end may lie beyond the last weight.
        """
        first = start // self.per_block * self.weights // self.together
        last = -(-stop // self.per_block) * self.weights
        stop_weight = -(-last // self.together) * self.together
        begin = first * self.together
        return begin, stop_weight, begin // self.weights * self.per_block


def parts_of(form: Form) -> dict[str, Vector]:
    """The vectors of a weight, by name."""
    of_codes = {
        "nf4": Vector(torch.uint8, BLOCK, BLOCK // 2, BLOCK),
        "int8": Vector(torch.int8, BLOCK, BLOCK, BLOCK),
    }
    parts = {"codes": of_codes[form.codes]}
    if not form.double:
        return parts | {"scales": Vector(torch.float32, BLOCK, 1, BLOCK)}
    group = BLOCK * GROUP
    return parts | {
        "scale_codes": Vector(torch.uint8, BLOCK, 1, group),
        "scale_ranges": Vector(torch.float32, group, 2, group),
    }


def pack(weight: Float[Tensor, "*S"], form: Form) -> dict[str, Tensor]:
    """The vectors that stand for `weight`, on its device; the same on every device.

    A code is the nearest one, of two equally near ones the lower in NF4 and the even one in int8.
    """
    flat = weight.detach().reshape(-1)
    packed = {
        name: torch.empty(part.numel(len(flat)), dtype=part.dtype, device=flat.device)
        for name, part in parts_of(form).items()
    }
    if flat.is_meta:
        return packed
    scales = torch.empty(-(-len(flat) // BLOCK), device=flat.device)
    per_weight = parts_of(form)["codes"].grain
    for start in range(0, len(flat), AT_ONCE):
        piece = flat[start : start + AT_ONCE].float()
        blocks = F.pad(piece, (0, -len(piece) % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        scales[start // BLOCK :][: len(largest)] = largest
        normalized = blocks / torch.where(largest > 0, largest, 1.0)[:, None]
        codes = _nf4_codes(normalized) if form.codes == "nf4" else _int8_codes(normalized)
        packed["codes"][start // per_weight :][: len(codes)] = codes
    if not form.double:
        return packed | {"scales": scales}
    codes, ranges = _pack_scales(scales)
    return packed | {"scale_codes": codes, "scale_ranges": ranges}


def unpack(packed: Packed, shape: torch.Size, form: Form, dtype: torch.dtype) -> Tensor:
    """The weight of `shape` that `packed` stands for, computed in fp32 and rounded once."""
    return scaled(packed["codes"], scales_of(packed, form), shape, form, dtype)


def scaled(
    codes: Shaped[Tensor, " n"],
    scales: Float[Tensor, " m"],
    shape: torch.Size,
    form: Form,
    dtype: torch.dtype,
) -> Tensor:
    """What codes stand for, times their scales, in fp32 and rounded once.

    Each of the scales is for as many weights: a block, or a run of them that lie in one.
    """
    if form.codes == "int8":
        scales = scales / INT8_STEPS
    per_weight = parts_of(form)["codes"].grain
    flat = torch.empty(len(codes) * per_weight, dtype=dtype, device=codes.device)
    run = len(flat) // max(1, len(scales))
    for start in range(0, len(flat), AT_ONCE):
        stop = min(start + AT_ONCE, len(flat))
        piece = codes[start // per_weight : stop // per_weight]
        if form.codes == "nf4":
            pairs = torch.index_select(_pairs(codes.device), 0, piece.int())
            numbers = pairs.view(torch.float32)
        else:
            numbers = piece.float()
        runs = numbers.view(-1, run)
        runs *= scales[start // run : stop // run, None]
        flat[start:stop] = runs.view(-1)
    return flat[: shape.numel()].view(shape)


def _nf4_codes(normalized: Float[Tensor, "blocks size"]) -> Shaped[Tensor, " n"]:
    """Two codes in a byte, the first in its high half."""
    levels = torch.tensor(NF4)
    codes = torch.zeros_like(normalized, dtype=torch.uint8)
    for middle in ((levels[1:] + levels[:-1]) / 2).tolist():  # several times as fast as bucketize
        codes += normalized > middle
    return (codes[:, ::2] * 16 + codes[:, 1::2]).view(-1)


def _int8_codes(normalized: Float[Tensor, "blocks size"]) -> Shaped[Tensor, " n"]:
    return (normalized * INT8_STEPS).round_().to(torch.int8).view(-1)


@functools.lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Int64[Tensor, " 256"]:
    """The two fp32 numbers that each byte stands for, as one: to look them up is faster so."""
    levels = torch.tensor(NF4, device=device)
    both = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    return both.view(torch.int64).view(-1)


def _pack_scales(scales: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """Codes of the scales, and of each group the smallest and the step."""
    missing = -len(scales) % GROUP
    groups = torch.cat([scales, scales[-1:].expand(missing)]).view(-1, GROUP)
    low, high = groups.aminmax(dim=1)
    step = (high - low) / 255
    codes = (groups - low[:, None]) / torch.where(step > 0, step, 1.0)[:, None]
    ranges = torch.stack([low, step], dim=1).view(-1)
    return codes.round_().to(torch.uint8).view(-1)[: len(scales)], ranges


def scales_of(
    packed: Packed, form: Form, groups: Int64[Tensor, " n"] | None = None
) -> Float[Tensor, " n"]:
    """The scale of each block, in fp32.

    Where there are blocks of a part of the weight alone, `groups` has the number of the group of
    each; without it they follow each other.
    """
    if not form.double:
        return packed["scales"]
    codes, ranges = packed["scale_codes"], packed["scale_ranges"].view(-1, 2)
    if groups is None:
        of_blocks = ranges.repeat_interleave(GROUP, dim=0)[: len(codes)]
    else:
        of_blocks = ranges[groups]
    low, step = of_blocks.unbind(1)
    return low + codes * step
