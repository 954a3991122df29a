"""Cases of AdamW: what is timed, and on a GPU what is compiled and what is right."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.config import Kernels
from pipeline.kernels.adamw import cuda, definition, dispatch
from pipeline.kernels.adamw.cuda import CHUNK, Shard, ShardTable, scalars_of
from pipeline.kernels.adamw.definition import AdamW, Weights
from pipeline.kernels.timing import Sizes, Timed, describe, name_of
from pipeline.kernels.toolchain.gpu import Gpu, Macros

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

SIZES = (1, 3, CHUNK + 4, 1000, 5, 0, 2 * CHUNK - 1)
"""Of shards: less than a vector load, more than a block, with a tail and without, and nothing."""

STEP = AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=5, multiplier=0.25)


@dataclass(frozen=True)
class Kind:
    """What of AdamW a specialisation of the kernel does."""

    gradient: torch.dtype = F32
    moments: torch.dtype = F32
    copy: torch.dtype | None = None
    split: bool = False

    def __str__(self) -> str:
        parts = [str(self.gradient), *["bf16 moments"] * (self.moments == BF16)]
        parts += [f"{self.copy} copy"] * (self.copy is not None)
        parts += ["split"] * self.split
        return ", ".join(parts).replace("torch.", "")


KINDS = [
    Kind(),
    Kind(BF16, copy=BF16),
    Kind(F16, copy=F16),
    Kind(F32, BF16, BF16),
    Kind(BF16, BF16, BF16),
    Kind(split=True),
    Kind(BF16, split=True),
    Kind(BF16, BF16, split=True),
    Kind(F32, copy=BF16),
]

SPECIALISATIONS: list[Macros] = [
    cuda.specialisation((gradient, moments, copy, split))
    for gradient in (F32, BF16, F16)
    for moments in (F32, BF16)
    for copy, split in [(None, True), (None, False), (BF16, False), (F16, False)]
]
"""Of the kernel for GPUs; as the engine steps bf16 weights first."""

FORMATS = (None, BF16, F16)
"""Of the weights that are timed; None is fp32, which are their own masters."""


def timed(devices: Sequence[torch.device], sizes: Sizes) -> Iterator[Timed]:
    """As the engine uses it."""
    for device in devices:
        for copy in FORMATS:
            yield _timed(device, copy, sizes.elements)


def _timed(device: torch.device, copy: torch.dtype | None, elements: int) -> Timed:
    split = copy == BF16
    generator = torch.Generator().manual_seed(0)
    master, gradient = torch.randn(2, elements, generator=generator).to(device)
    exp_avg, exp_avg_sq = torch.zeros(2, elements, device=device)
    out = low_bits = None
    if split:
        master, low_bits = definition.split_master(master)
    elif copy is not None:
        out = torch.empty(elements, dtype=copy, device=device)
    weights = Weights(master, exp_avg, exp_avg_sq, out, low_bits)
    step = AdamW(lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1, multiplier=0.5)

    def step_with(kernels: Kernels) -> None:
        dispatch.adamw_(weights, gradient, step, kernels=kernels)

    return Timed(
        name=f"AdamW on {device.type}, {name_of(copy or F32)} weights",
        state=describe(dispatch.find(device, copy=None if split else copy, split=split)),
        ours=lambda: step_with("auto"),
        without=lambda: step_with("off"),
        definition=lambda: definition.adamw_(weights, gradient, step),
    )


def shard_of(kind: Kind, size: int, *, shift: int, seed: int) -> Shard:
    """Random vectors that begin `shift` elements into their memory, between others' numbers."""
    generator = torch.Generator().manual_seed(seed)

    def vector(dtype: torch.dtype, scale: float, *, positive: bool = False) -> Tensor:
        values = torch.randn(size + shift + 5, generator=generator) * scale
        values = values.abs() if positive else values
        return values.to(dtype)[shift : shift + size]

    master, low_bits = vector(F32, 1.0), None
    if kind.split:
        whole = vector(F32, 1.0).clone()
        master, low_bits = definition.split_master(whole)
    weights = Weights(
        master=master,
        exp_avg=vector(kind.moments, 1e-2),
        exp_avg_sq=vector(kind.moments, 1e-3, positive=True),
        copy=None if kind.copy is None else vector(kind.copy, 1.0),
        low_bits=low_bits,
    )
    gradient = vector(kind.gradient, 1.0)
    decay = 0.1 * (seed % 2)
    return Shard(weights=weights, gradient=gradient, lr=1.0 + seed, weight_decay=decay)


def shards_of(kind: Kind, *, shift: int = 0, sizes: Sequence[int] = SIZES) -> list[Shard]:
    """One of each size."""
    return [shard_of(kind, size, shift=shift, seed=seed) for seed, size in enumerate(sizes)]


def copied(shard: Shard) -> Shard:
    """The same numbers in other memory; the gradient is shared."""
    tensors = {name: each.clone() for name, each in shard.weights.tensors().items()}
    return dataclasses.replace(shard, weights=Weights(**tensors))


def by_reference(shard: Shard, step: AdamW) -> None:
    """A step of a shard by the definition."""
    own = dataclasses.replace(step, lr=step.lr * shard.lr, weight_decay=shard.weight_decay)
    definition.adamw_(shard.weights, shard.gradient, own)


def moved(shard: Shard, device: torch.device) -> Shard:
    """The same numbers on another device."""
    tensors = {name: each.to(device) for name, each in shard.weights.tensors().items()}
    gradient = shard.gradient.to(device)
    return dataclasses.replace(shard, weights=Weights(**tensors), gradient=gradient)


def is_right(kind: Kind, gpu: Gpu) -> bool:
    """Whether the kernel has the bits of the definition on a CPU."""
    expected = shards_of(kind)
    ours = [moved(copied(shard), gpu.device) for shard in expected]
    for shard in expected:
        by_reference(shard, STEP)
    scalars = scalars_of(STEP, gpu.device)
    cuda.adamw_(ShardTable(ours, gpu), scalars, betas=STEP.betas, eps=STEP.eps)
    return all(
        torch.equal(one.weights.tensors()[name].cpu(), tensor)
        for one, other in zip(ours, expected, strict=True)
        for name, tensor in other.weights.tensors().items()
    )
