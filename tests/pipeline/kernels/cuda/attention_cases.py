"""Cases of decode attention, and the run of one."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels import decode_reference
from pipeline.kernels.cuda import decode
from pipeline.kernels.cuda.gpu import Gpu
from pipeline.kernels.decode_reference import Scores

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error of the norm: of fp32 sums, and of the rounding of the output."""


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call."""

    dtype: torch.dtype
    head_size: int
    heads: int
    kv_heads: int
    lengths: tuple[int, ...] = (1, 77, 130)
    starts: tuple[int, ...] | None = None
    window: int | None = None
    alibi: bool = False
    num_splits: int | None = 1
    schedule: int = 0
    seed: int = 0

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        text = f"{name}-{self.head_size}-{self.heads}:{self.kv_heads}-splits{self.num_splits}"
        text += "-starts" * (self.starts is not None) + f"-window{self.window}" * bool(self.window)
        return text + "-alibi" * self.alibi + f"-order{self.schedule}"


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case; what no kernel may read is NaN."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Scores

    def tensors(self) -> tuple[Tensor | None, ...]:
        scores = self.scores
        return (self.query, self.key, self.value, scores.lengths, scores.starts, scores.slopes)


def inputs_of(case: Case, device: torch.device) -> Inputs:
    """The layout of the slot cache, wider than what is used; what may not be read is NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    batch, width = len(case.lengths), max(case.lengths) + 3

    def cache() -> Tensor:
        shape = (batch, case.kv_heads, width, case.head_size)
        stored = torch.randn(shape, generator=generator)
        starts = case.starts or (0,) * batch
        for row, (start, length) in enumerate(zip(starts, case.lengths, strict=True)):
            first = max(start, length - (case.window or length))
            stored[row, :, :first] = math.nan
            stored[row, :, length:] = math.nan
        return stored.to(case.dtype).to(device)

    # As the layers of a model give it: (1, head, sequence, size), looked at the other way round.
    shape = (case.heads, batch, case.head_size)
    query = torch.randn(shape, generator=generator).to(case.dtype).to(device).transpose(0, 1)
    slopes = torch.rand(case.heads, generator=generator).to(device) if case.alibi else None
    lengths, starts = (
        None if numbers is None else torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in (case.lengths, case.starts)
    )
    assert lengths is not None
    scores = Scores(
        lengths=lengths,
        scaling=case.head_size**-0.5,
        sliding_window=case.window,
        starts=starts,
        slopes=slopes,
    )
    return Inputs(query, cache(), cache(), scores)


def run(case: Case, inputs: Inputs, gpu: Gpu) -> Tensor:
    """What the kernel makes of it."""
    return decode.decode_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.scores,
        gpu=gpu,
        longest=max(case.lengths),
        num_splits=case.num_splits,
    )


def relative_error(inputs: Inputs, out: Tensor) -> float:
    """Of the norm, against the definition in float64; infinite where a number is NaN."""
    wide = (each.double() for each in (inputs.query, inputs.key, inputs.value))
    expected = decode_reference.decode_attention(*wide, inputs.scores)
    error = ((out.double() - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (1, 77, 130)

QUICK = [
    Case(BF16, 128, 8, 2, RAGGED, num_splits=splits, schedule=order)
    for splits, order in [(1, 0), (1, 7), (3, 1)]
]
QUICK += [
    Case(F32, 64, 2, 2, RAGGED, starts=(0, 13, 129), num_splits=splits, schedule=order)
    for splits, order in [(1, 1), (3, 7)]
]
QUICK += [
    Case(F16, 80, 7, 1, RAGGED, window=40, num_splits=1, schedule=7),
    Case(F16, 80, 7, 1, RAGGED, window=40, alibi=True, num_splits=2),
    Case(F32, 96, 3, 3, (0, 5, 33), num_splits=2, schedule=1),
    Case(BF16, 256, 16, 2, (64, 200), num_splits=None, alibi=True),
    Case(F32, 256, 9, 1, (64, 200), num_splits=2, schedule=7),
]
"""A little of everything, with as few specialisations as that takes."""

SHAPES = [
    *((size, heads, kv) for size in decode.HEAD_SIZES for heads, kv in [(2, 2), (8, 2), (7, 1)]),
    (128, 16, 2),
    (64, 71, 1),
]
OPTIONS = [
    {"num_splits": 1, "schedule": 0},
    {"num_splits": 3, "schedule": 1, "starts": (0, 13, 127)},
    {"num_splits": 1, "schedule": 7, "window": 40, "alibi": True},
    {"num_splits": 3, "schedule": 7, "window": 40, "starts": (0, 60, 3)},
]
GRID = [
    Case(dtype, *shape, RAGGED, **options)  # pyright: ignore[reportArgumentType]
    for dtype in (BF16, F16, F32)
    for shape in SHAPES
    for options in OPTIONS
]
"""Every dtype, head size and kind of sharing, under every option."""
