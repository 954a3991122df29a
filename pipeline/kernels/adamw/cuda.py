"""AdamW on a GPU: a table of shards, and one launch for all of them."""

import ctypes
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from pipeline.kernels.adamw import definition
from pipeline.kernels.adamw.definition import AdamW, Shard, Weights
from pipeline.kernels.gpu import DTYPES, DTYPES_BY_NAME, Gpu, Macros

CHUNK = 16384
"""Elements that a block of threads updates, as in the source."""

THREADS = 256
FACTORS_BYTES = 36
"""Bytes of the struct `Factors` of the source."""

SCALARS = ("rate", "beta1_power", "beta2_power", "multiplier")
"""What changes from step to step: the doubles of the struct `Scalars`."""

MOMENTS = DTYPES | {torch.uint8: "u8"}
"""What the source calls their dtypes."""

Kind = tuple[torch.dtype, torch.dtype, torch.dtype | None, bool]
"""Dtypes of the gradient, of the moments and of the copy, and whether the master is split."""


class _Shard(ctypes.Structure):
    """`Shard` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("master", "exp_avg", "exp_avg_sq")),
        *((name, ctypes.c_void_p) for name in definition.EXPONENTS),
        *((name, ctypes.c_void_p) for name in ("copy", "low_bits", "gradient")),
        *((name, ctypes.c_int64) for name in ("numel", "first_block")),
        *((name, ctypes.c_double) for name in ("lr", "weight_decay")),
    )


class _Params(ctypes.Structure):
    """`AdamwParams` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("shards", "shard_of_block", "scalars")),
        *((name, ctypes.c_double) for name in ("beta1", "beta2", "eps")),
    )


class ShardTable:
    """Shards of one kind, where they lie, in the memory of the GPU.

    It holds as long as the tensors stay where they are: `place` says where that is.

    Raises:
        ValueError: there is no shard, or one is not what the kernel takes.
    """

    def __init__(self, shards: Sequence[Shard], gpu: Gpu) -> None:
        if not shards:
            raise ValueError("AdamW needs a shard")
        for number, shard in enumerate(shards):
            _check(shard, gpu, number)
        self.shards, self.gpu, self.place = tuple(shards), gpu, place_of(shards)
        kinds = {kind_of(shard.weights, shard.gradient) for shard in shards}
        if len(kinds) > 1:
            raise ValueError(f"shards of one launch have the same dtypes, got {kinds}")
        self.kind = kinds.pop()
        counts = [-(-len(shard.gradient) // CHUNK) for shard in shards]
        self.num_blocks = sum(counts)
        first_block = 0
        rows: list[_Shard] = []
        for shard, count in zip(shards, counts, strict=True):
            rows.append(_row(shard, first_block))
            first_block += count
        content = b"".join(bytes(row) for row in rows)
        of_block = torch.arange(len(shards), dtype=torch.int32)
        of_block = of_block.repeat_interleave(torch.tensor(counts))
        words = memoryview(content).cast("q").tolist()
        # Not waited for: the driver has copied so little before the call returns.
        self.rows = torch.tensor(words, dtype=torch.int64).to(gpu.device, non_blocking=True)
        self.shard_of_block = of_block.to(gpu.device, non_blocking=True)


def place_of(shards: Sequence[Shard]) -> tuple[tuple[int | float, ...], ...]:
    """What tells a table of these shards from any other: their memory, lengths and numbers."""
    return tuple(
        (
            *(tensor.data_ptr() for tensor in shard.weights.tensors().values()),
            *(shard.gradient.data_ptr(), len(shard.gradient), shard.lr, shard.weight_decay),
        )
        for shard in shards
    )


def scalars_of(step: AdamW, device: torch.device) -> Float64[Tensor, "4"]:
    """The numbers of a step as the kernel reads them; shards multiply `lr` by their own."""
    # Powers as Python has them, as in the reference: another way rounds otherwise.
    powers = [beta**step.step for beta in step.betas]
    numbers = [step.lr, *powers, step.multiplier]
    return torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)


def adamw_(
    table: ShardTable,
    scalars: Float64[Tensor, "4"],
    *,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One step of `definition.adamw_` for all shards of a table, in place.

    `scalars` are the rate, both betas to the power of the step's number and the multiplier of the
    gradient; they are read on the GPU.
    """
    if table.num_blocks == 0:
        return
    if scalars.device != table.gpu.device or not scalars.is_contiguous():
        raise ValueError(f"the scalars are on {scalars.device}, the shards on {table.gpu.device}")
    defines = specialisation(table.kind)
    params = _Params(
        shards=table.rows.data_ptr(),
        shard_of_block=table.shard_of_block.data_ptr(),
        scalars=scalars.data_ptr(),
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
    )
    table.gpu.kernel("adamw", "adamw", defines)(
        params, grid=(table.num_blocks, 1, 1), block=(THREADS, 1, 1), shared_bytes=FACTORS_BYTES
    )


def run(gpu: Gpu, weights: Weights, gradient: Float[Tensor, " n"], step: AdamW) -> None:
    """One step of one vector, by numbers that the host has."""
    shard = Shard(weights=weights, gradient=gradient, lr=1.0, weight_decay=step.weight_decay)
    scalars = scalars_of(step, gpu.device)
    adamw_(ShardTable([shard], gpu), scalars, betas=step.betas, eps=step.eps)


def specialisation(kind: Kind) -> dict[str, str | int]:
    """Macros of the kernel."""
    gradient, moments, copy, split = kind
    return {
        "GRADIENT": DTYPES[gradient],
        "MOMENT": MOMENTS[moments],
        "EIGHT_BITS": int(moments == torch.uint8),
        "COPY": DTYPES[copy or torch.bfloat16],
        "HAS_COPY": int(copy is not None),
        "SPLIT": int(split),
        "PARAMS_BYTES": ctypes.sizeof(_Params),
        "SHARD_BYTES": ctypes.sizeof(_Shard),
        "SCALARS_BYTES": 8 * len(SCALARS),
        "FACTORS_BYTES": FACTORS_BYTES,
    }


def kind_of(weights: Weights, gradient: Float[Tensor, " n"]) -> Kind:
    """Which specialisation takes these vectors."""
    copy = None if weights.copy is None else weights.copy.dtype
    return gradient.dtype, weights.exp_avg.dtype, copy, weights.low_bits is not None


def _check(shard: Shard, gpu: Gpu, number: int) -> None:
    try:
        definition.check(shard.weights, shard.gradient)
    except ValueError as error:
        raise ValueError(f"shard {number}: {error}") from None
    if shard.gradient.device != gpu.device:
        raise ValueError(
            f"shard {number} is on {shard.gradient.device}, the kernel on {gpu.device}"
        )
    for name, tensor in (shard.weights.tensors() | {"gradient": shard.gradient}).items():
        if tensor.data_ptr() % tensor.element_size():
            raise ValueError(
                f"shard {number}: {name} begins between the places of two elements in memory; copy"
                " it to where the kernel can read it"
            )


def _row(shard: Shard, first_block: int) -> _Shard:
    vectors = shard.weights.tensors()
    return _Shard(
        **{name: vector.data_ptr() for name, vector in vectors.items()},
        gradient=shard.gradient.data_ptr(),
        numel=len(shard.gradient),
        first_block=first_block,
        lr=shard.lr,
        weight_decay=shard.weight_decay,
    )


def self_test(gpu: Gpu, defines: Macros) -> bool:
    """Two steps of a vector with a tail, to the bit."""
    dtypes = {name: DTYPES_BY_NAME[str(defines[name])] for name in ("GRADIENT", "COPY")}
    generator = torch.Generator().manual_seed(0)
    gradient, master, exp_avg, square = torch.randn(4, 301, generator=generator)
    low_bits = None
    if defines["SPLIT"]:
        master, low_bits = definition.split_master(master)
    (moments,) = (dtype for dtype, name in MOMENTS.items() if name == defines["MOMENT"])
    weights = Weights(
        master=master,
        **definition.new_moments(exp_avg, moments),
        copy=torch.zeros(301, dtype=dtypes["COPY"]) if defines["HAS_COPY"] else None,
        low_bits=low_bits,
    )
    definition.write_moments(weights, exp_avg, square.square())
    gradient = gradient.to(dtypes["GRADIENT"])
    there = Weights(
        **{name: each.to(gpu.device, copy=True) for name, each in weights.tensors().items()}
    )
    for number in (1, 2):
        step = AdamW(
            lr=0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            step=number,
            multiplier=0.5,
        )
        run(gpu, there, gradient.to(gpu.device), step)
        definition.adamw_(weights, gradient, step)
    ours = there.tensors()
    return all(torch.equal(ours[name].cpu(), each) for name, each in weights.tensors().items())
