"""Cases of AdamW: inputs, specializations, and what is right."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.adamw import (
    BLOCK_ELEMENTS,
    AdamW,
    Formats,
    Shard,
    ShardTable,
    Weights,
    cuda_macros,
    reference_adamw_,
    split_master,
    step_scalars,
)
from pipeline.kernels.gpu import Gpu, Macros

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CPU = torch.device("cpu")

SIZES = (1, 3, BLOCK_ELEMENTS + 4, 1000, 5, 0, 2 * BLOCK_ELEMENTS - 1)
"""Shard sizes: less than a vector load, more than a block, with and without a tail, and empty."""

STEP = AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=5, multiplier=0.25)


@dataclass(frozen=True)
class Case:
    """Options of one specialisation of the kernel."""

    moments: torch.dtype = F32
    copy: torch.dtype | None = None
    split: bool = False
    shift: int = 0
    """Offset of the vectors in their storage, in elements."""

    schedule: int = 0

    def __str__(self) -> str:
        parts = [f"{self.moments} moments"]
        parts += [f"{self.copy} copy"] * (self.copy is not None)
        parts += ["split"] * self.split + [f"shift {self.shift}"] * (self.shift > 0)
        return ", ".join(parts).replace("torch.", "")


@dataclass(frozen=True)
class Inputs:
    """Shards of one kind."""

    shards: list[Shard]

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        vectors = [shard.weights.tensors().values() for shard in self.shards]
        return [*itertools.chain(*vectors), *(shard.gradient for shard in self.shards)]


QUICK = [
    dataclasses.replace(case, shift=shift, schedule=shift)
    for shift in (0, 1)
    for case in [
        Case(),
        Case(copy=BF16),
        Case(copy=F16),
        Case(BF16, BF16),
        Case(split=True),
        Case(BF16, split=True),
    ]
]
GRID = QUICK

SPECIALIZATIONS: list[Macros] = [
    cuda_macros(Formats(moments, copy, split))
    for moments in (F32, BF16)
    for copy, split in [(None, True), (None, False), (BF16, False), (F16, False)]
]
"""Specializations of the GPU kernel, those with split masters first."""


def make_shard(case: Case, size: int, *, seed: int, device: torch.device = CPU) -> Shard:
    """Return a shard of random vectors, made on the CPU and stored between other numbers."""
    generator = torch.Generator().manual_seed(seed)

    def vector(dtype: torch.dtype, scale: float) -> Tensor:
        return (torch.randn(size, generator=generator) * scale).to(dtype)

    master, low_bits = vector(F32, 1.0), None
    if case.split:
        master, low_bits = split_master(master)
    weights = Weights(
        master=master,
        exp_avg=vector(case.moments, 1e-2),
        exp_avg_sq=vector(case.moments, 1e-3).abs(),
        copy=None if case.copy is None else vector(case.copy, 1.0),
        low_bits=low_bits,
    )

    def copy_to_device(tensor: Tensor) -> Tensor:
        storage = torch.empty(len(tensor) + case.shift + 5, dtype=tensor.dtype, device=device)
        return storage[case.shift :][: len(tensor)].copy_(tensor)

    return Shard(
        weights=Weights(
            **{name: copy_to_device(tensor) for name, tensor in weights.tensors().items()}
        ),
        gradient=copy_to_device(vector(F32, 1.0)),
        lr=1.0 + seed,
        weight_decay=0.1 * (seed % 2),
    )


def make_shards(
    case: Case, sizes: Sequence[int] = SIZES, *, device: torch.device = CPU
) -> list[Shard]:
    """Return one shard of each size."""
    return [make_shard(case, size, seed=seed, device=device) for seed, size in enumerate(sizes)]


def clone(shard: Shard) -> Shard:
    """Return the same numbers in other memory; the gradient is shared."""
    tensors = {name: tensor.clone() for name, tensor in shard.weights.tensors().items()}
    return dataclasses.replace(shard, weights=Weights(**tensors))


def reference_step(shard: Shard, step: AdamW) -> None:
    """Step a shard by the definition."""
    shard_step = dataclasses.replace(step, lr=step.lr * shard.lr, weight_decay=shard.weight_decay)
    reference_adamw_(shard.weights, shard.gradient, shard_step)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Return shards of all sizes."""
    return Inputs(make_shards(case, device=device))


def run(case: Case, inputs: Inputs, gpu: Gpu) -> list[Tensor]:
    """Run the kernel on the weights, in place."""
    del case
    ShardTable(inputs.shards, gpu).step(step_scalars(STEP, gpu.device), STEP)
    return inputs.tensors()


def is_correct(case: Case, inputs: Inputs, out: Sequence[Tensor]) -> bool:
    """Return whether the bits are those of the definition on a CPU."""
    del inputs
    expected = Inputs(make_shards(case))
    for shard in expected.shards:
        reference_step(shard, STEP)
    return all(map(torch.equal, (tensor.cpu() for tensor in out), expected.tensors()))
