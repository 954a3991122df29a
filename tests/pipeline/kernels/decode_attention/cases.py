"""Cases of decode attention: inputs, specializations and expected results."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.decode_attention import (
    HEAD_SIZES,
    PAGE,
    AttentionSpec,
    HeadGrouping,
    cuda_macros,
    launch,
    reference_attention,
)
from pipeline.kernels.gpu import Gpu, Macros

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error of the norm, from fp32 sums and the rounding of the output."""


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call."""

    dtype: torch.dtype
    head_size: int
    heads: int
    kv_heads: int
    lengths: tuple[int, ...] = (1, 77, 130)
    window: int | None = None
    num_splits: int | None = 1
    schedule: int = 0
    seed: int = 0

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        text = f"{name}-{self.head_size}-{self.heads}:{self.kv_heads}-splits{self.num_splits}"
        return text + f"-window{self.window}" * bool(self.window) + f"-order{self.schedule}"


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case; elements that a kernel must not read are NaN."""

    query: Tensor
    key: Tensor
    value: Tensor
    spec: AttentionSpec

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
        return (self.query, self.key, self.value, self.spec.lengths, self.spec.pages)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Return shuffled and unused pages; elements that a kernel must not read are NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    batch = len(case.lengths)
    pages = make_pages(case.lengths, generator)

    def cache() -> Tensor:
        stored = torch.full((pages.numel() + 1, case.kv_heads, PAGE, case.head_size), math.nan)
        for row, length in enumerate(case.lengths):
            for token in range(max(0, length - (case.window or length)), length):
                state = torch.randn(case.kv_heads, case.head_size, generator=generator)
                stored[pages[row, token // PAGE], :, token % PAGE] = state
        return stored.to(case.dtype).to(device)

    # In the layout of a model's layers: (1, head, sequence, size), transposed.
    shape = (case.heads, batch, case.head_size)
    query = torch.randn(shape, generator=generator).to(case.dtype).to(device).transpose(0, 1)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    spec = AttentionSpec(
        lengths=lengths,
        pages=pages.to(device),
        scaling=case.head_size**-0.5,
        sliding_window=case.window,
    )
    return Inputs(query, cache(), cache(), spec)


def make_pages(lengths: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return pages of sequences of these lengths, and one more of each, in a random order."""
    pages_per_sequence = max(lengths) // PAGE + 2
    order = torch.randperm(len(lengths) * pages_per_sequence, generator=generator) + 1
    return order.view(-1, pages_per_sequence).int()


def run(case: Case, inputs: Inputs, gpu: Gpu) -> Tensor:
    """Run the kernel."""
    return launch(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.spec,
        gpu=gpu,
        longest=max(case.lengths),
        num_splits=case.num_splits,
    )


def relative_error(inputs: Inputs, out: Tensor) -> float:
    """Return the error relative to the norm of the definition in float64; infinite with a NaN."""
    query, key, value = (x.double() for x in (inputs.query, inputs.key, inputs.value))
    expected = reference_attention(query, key, value, inputs.spec)
    error = ((out.double() - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf


def is_correct(case: Case, inputs: Inputs, out: Tensor) -> bool:
    """Return whether the result is that of the definition, except for rounding."""
    return relative_error(inputs, out) < TOLERANCES[case.dtype]


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (1, 77, 130)

QUICK = [
    Case(BF16, 128, 8, 2, RAGGED, num_splits=splits, schedule=order)
    for splits, order in [(1, 0), (1, 7), (3, 1)]
]
QUICK += [
    Case(F32, 64, 2, 2, RAGGED, num_splits=splits, schedule=order)
    for splits, order in [(1, 1), (3, 7)]
]
QUICK += [
    Case(F16, 80, 7, 1, RAGGED, window=40, num_splits=1, schedule=7),
    Case(F16, 80, 7, 1, RAGGED, window=40, num_splits=2),
    Case(F32, 96, 3, 3, (0, 5, 33), num_splits=2, schedule=1),
    Case(BF16, 256, 8, 1, (64, 600), num_splits=None),
    Case(BF16, 48, 6, 6, RAGGED, num_splits=2, schedule=7),
    Case(F32, 8, 8, 4, (1, 256, 700), num_splits=1, schedule=1),
    Case(F32, 256, 9, 1, (64, 200), num_splits=2, schedule=7),
]
"""All kinds of inputs with few specializations."""

SHAPES = [
    *((size, heads, kv) for size in HEAD_SIZES for heads, kv in [(2, 2), (8, 2), (7, 1)]),
    (128, 16, 2),
    (64, 71, 1),
]
LONG = (1, 512, 513, 1100)
"""The loop reads up to 512 keys per iteration: 128 threads, four keys each, head size 8."""

OPTIONS: list[dict[str, Any]] = [
    {"num_splits": 1, "schedule": 0, "lengths": LONG},
    {"num_splits": 3, "schedule": 1, "lengths": LONG},
    {"num_splits": 1, "schedule": 7, "window": 40},
    {"num_splits": 3, "schedule": 7, "window": 40},
]
GRID = [
    Case(dtype, size, heads, kv_heads, **options)
    for dtype in (BF16, F16, F32)
    for size, heads, kv_heads in SHAPES
    for options in OPTIONS
]
"""Every dtype, head size and kind of sharing, under every option."""

LARGE = [
    Case(BF16, size, heads, kv_heads, (length, 100) * 16, num_splits=None)
    for size, heads, kv_heads, length in [(64, 32, 32, 511), (128, 32, 8, 2047), (128, 8, 1, 8191)]
]
"""Shapes of OPT-1.3B, Llama-3-8B and an eighth of Llama-3-70B, for a GPU."""

SPECIALIZATIONS: list[Macros] = [
    cuda_macros(dtype, HeadGrouping(heads, size, dtype.itemsize))
    for dtype in (BF16, F16, F32)
    for size in sorted(HEAD_SIZES, key=lambda size: size != 128)
    for heads in (8, 1, 4, 7)
]
"""Specializations of the GPU kernel, the most common first."""
