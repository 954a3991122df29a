"""AdamW over flat vectors: a single pass over memory if there is a kernel.

`reference_adamw_` defines the operator in PyTorch. The C++ kernel (adamw.cpp), the CUDA kernel
(adamw.cu) and PyTorch on a CPU give identical bits. PyTorch on a GPU differs in the last bit of
divisions by host scalars. Dimension names: n elements of a flat vector.
"""

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int16
from torch import Tensor

from pipeline.config import Kernels
from pipeline.kernels import choice
from pipeline.kernels.build import Library, gomp_parallel
from pipeline.kernels.build import build as build_library
from pipeline.kernels.gpu import DTYPES, Gpu

COPY_DTYPES = (torch.bfloat16, torch.float16)

CHUNK = 65536
"""Number of elements that PyTorch updates at once; temporary tensors fit in a core's cache."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Scalars of one step of AdamW (Loshchilov and Hutter 2019, algorithm 2)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    step: int
    """Number of the step, starting at 1."""

    multiplier: float = 1.0
    """Factor that scales the gradient: clip coefficient divided by loss scale, in fp32."""


@dataclass(frozen=True)
class Weights:
    """A flat vector that AdamW trains, with its Adam moments."""

    master: Float[Tensor, " n"]
    """The fp32 master weights; with `low_bits`, the model's bf16 weights."""

    exp_avg: Float[Tensor, " n"]
    """Moving average of the gradient, stored in fp32 or bf16; computed in fp32."""

    exp_avg_sq: Float[Tensor, " n"]
    """Moving average of the squared gradient, in the same dtype."""

    copy: Float[Tensor, " n"] | None = None
    """bf16 or fp16 vector that receives the new master weights, rounded by `round_weights`."""

    low_bits: Int16[Tensor, " n"] | None = None
    """The bits of the fp32 master weights that the bf16 `master` lacks, from `split_master`."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the vectors that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def narrow(self, span: slice) -> "Weights":
        """Return a view of a range of elements of each vector."""
        return Weights(**{name: value[span] for name, value in self.tensors().items()})


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A flat vector to update, with its gradient, learning-rate factor and weight decay."""

    weights: Weights
    gradient: Float[Tensor, " n"]
    lr: float
    """Factor that scales the step's learning rate for this shard."""

    weight_decay: float


class Formats(NamedTuple):
    """Data types of a step; the kernels have a specialization for each combination."""

    moments: torch.dtype
    copy: torch.dtype | None
    split: bool

    @classmethod
    def from_weights(cls, weights: Weights) -> "Formats":
        """Return the data types of these vectors."""
        copy = None if weights.copy is None else weights.copy.dtype
        return cls(weights.exp_avg.dtype, copy, weights.low_bits is not None)

    def macros(self, names: Mapping[torch.dtype | None, str]) -> dict[str, str | int]:
        """Return the macros that select a kernel; `names` are the source's names of dtypes."""
        return {
            "MOMENT": names[self.moments],
            "COPY": names[self.copy],
            "HAS_COPY": int(self.copy is not None),
            "SPLIT": int(self.split),
        }


def new_moments(like: Float[Tensor, " n"], dtype: torch.dtype) -> dict[str, Tensor]:
    """Create zero moments for a vector, named like the fields of `Weights`."""
    return {name: torch.zeros_like(like, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}


@torch.no_grad()
def reference_adamw_(weights: Weights, gradient: Float[Tensor, " n"], step: AdamW) -> None:
    """Take one step of AdamW in PyTorch, in place.

        g = multiplier * gradient
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p = (1 - lr * weight_decay) * p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    Rounding follows the SIMD lanes of PyTorch's fused AdamW, so that both give the same bits: `m`
    and `v` each end in a fused multiply-add; all else is rounded after each operation. (PyTorch
    rounds the last few elements of a vector differently; this function rounds all alike.) Moments
    in bf16 are rounded when stored; the step uses them in fp32. `round_weights` rounds weights.
    """
    (beta1, beta2), t = step.betas, step.step
    grad = gradient * step.multiplier
    master, low_bits = weights.master, weights.low_bits
    if low_bits is not None:
        master = join_master(master, low_bits)

    master = master * (1 - step.lr * step.weight_decay)
    exp_avg = weights.exp_avg.float().lerp(grad, 1 - beta1)
    exp_avg_sq = (weights.exp_avg_sq.float() * beta2).addcmul(grad, grad, value=1 - beta2)
    # Computed in fp64, because PyTorch may use MKL's fp32 square root, whose rounding differs from
    # the processor's.
    root = exp_avg_sq.double().sqrt().float()
    denominator = root / math.sqrt(1 - beta2**t) + step.eps
    master = master + (-step.lr / (1 - beta1**t)) * exp_avg / denominator

    weights.exp_avg.copy_(exp_avg)
    weights.exp_avg_sq.copy_(exp_avg_sq)
    if weights.copy is not None:
        weights.copy.copy_(round_weights(master, weights.copy.dtype))
    if low_bits is not None:
        master, new_low_bits = split_master(master)
        low_bits.copy_(new_low_bits)
    weights.master.copy_(master)


def round_weights(masters: Float[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, " n"]:
    """Round fp32 master weights to the nearest value of the model's `dtype`.

    In bf16, ties round away from zero. With ties to even, as in fp16, 2^16 + 1 fp32 values would
    round to the same even value, and 16 more bits could not distinguish them (`split_master`).
    Infinity and NaN are preserved.
    """
    if dtype == torch.bfloat16:
        # Setting the last bit in the upper half of the interval makes ties round up.
        bits = masters.view(torch.int32)
        adjusted = bits >> 15
        adjusted &= 1
        adjusted |= bits
        masters = adjusted.view(torch.float32)
    return masters.to(dtype)


def split_master(master: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Int16[Tensor, " n"]]:
    """Split fp32 master weights into bf16, rounded by `round_weights`, and 16 low bits.

    `join_master` restores the masters exactly, except for NaN payloads.
    """
    return round_weights(master, torch.bfloat16), master.view(torch.int32).short()


def join_master(weights: Float[Tensor, " n"], low_bits: Int16[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Invert `split_master`."""
    bits = weights.view(torch.int16).int()
    bits <<= 16
    bits += low_bits  # negative where the weight was rounded up
    return bits.view(torch.float32)


# Choosing an implementation


def adamw_(
    weights: Weights, gradient: Float[Tensor, " n"], step: AdamW, *, kernels: Kernels = "auto"
) -> None:
    """Take one in-place step of AdamW, as defined by `reference_adamw_`.

    All vectors must be contiguous, of equal length, on one device, and must not share memory. The
    gradient is fp32. With `kernels` off, or auto without a kernel, PyTorch computes the step.

    Raises:
        KernelError: `kernels` is required, and no kernel supports the vectors.
    """
    if gradient.numel() == 0:
        return
    kernel = find_kernel(gradient.device, Formats.from_weights(weights), kernels)
    if isinstance(kernel, Gpu):
        shard = Shard(weights=weights, gradient=gradient, lr=1.0, weight_decay=step.weight_decay)
        ShardTable([shard], kernel).step(step_scalars(step, kernel.device), step)
    elif kernel is not None:
        _step_on_cpu(kernel, weights, gradient, step)
    else:
        numel = gradient.numel()
        size = CHUNK if gradient.device.type == "cpu" else numel
        for start in range(0, numel, size):
            span = slice(start, min(start + size, numel))
            reference_adamw_(weights.narrow(span), gradient[span], step)


class FlatAdamW:
    """AdamW for many vectors; on a GPU, one launch updates all vectors of the same formats.

    Its address tables are kept while no vector moves, so that a step sends four numbers to the GPU.
    """

    def __init__(self) -> None:
        self._addresses: object = None
        self._tables: list[ShardTable] = []

    def step(self, shards: Sequence[Shard], step: AdamW, *, kernels: Kernels) -> None:
        """Take one in-place step of all shards, each with its own learning rate and weight decay.

        Each shard's learning-rate factor is multiplied by the learning rate of `step`.

        Raises:
            KernelError: as raised by `adamw_`.
        """
        addresses = [_addresses(shard) for shard in shards]
        if addresses != self._addresses:
            self._addresses, self._tables = None, []
            rest = self._build_tables(shards, kernels)
            for shard in rest:
                scaled_step = replace(step, lr=shard.lr * step.lr, weight_decay=shard.weight_decay)
                adamw_(shard.weights, shard.gradient, scaled_step, kernels=kernels)
            if not rest:
                self._addresses = addresses
        for table in self._tables:
            table.step(step_scalars(step, table.gpu.device), step)

    def _build_tables(self, shards: Sequence[Shard], kernels: Kernels) -> list[Shard]:
        """Build a table of the shards of each format on a GPU; return the other shards."""
        by_formats: dict[tuple[Gpu, Formats], list[Shard]] = {}
        rest: list[Shard] = []
        for shard in shards:
            kernel, formats = None, Formats.from_weights(shard.weights)
            if shard.gradient.is_cuda and shard.gradient.numel():
                kernel = find_kernel(shard.gradient.device, formats, kernels)
            if isinstance(kernel, Gpu):
                by_formats.setdefault((kernel, formats), []).append(shard)
            else:
                rest.append(shard)
        self._tables = [ShardTable(group, gpu) for (gpu, _), group in by_formats.items()]
        return rest


def find_kernel(device: torch.device, formats: Formats, kernels: Kernels) -> Library | Gpu | None:
    """Return the kernel for vectors on a device, built if necessary, or None if PyTorch is used.

    Raises:
        KernelError: the kernel is required and can't be built.
    """
    if kernels == "off":
        return None
    if device.type == "cuda":
        kernel = choice.load_kernel(device, "adamw", cuda_macros(formats))
    elif device.type == "cpu":
        kernel = library(formats)
    else:
        kernel = f"no kernel supports the device type {device.type}"
    return choice.resolve("AdamW", kernel, kernels)


# The C++ kernel

CPP_NAMES = {
    torch.float32: "Float32",
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    None: "None",
}
"""Names of data types in adamw.cpp."""


class Vectors(ctypes.Structure):
    """Addresses of the vectors; adamw.cpp has the same structure."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("master", "exp_avg", "exp_avg_sq", "copy", "low_bits", "gradient")
    ]


class Scalars(ctypes.Structure):
    """Scalars of a step for the kernel; adamw.cpp has the same structure."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            *("decay", "exp_avg_weight", "exp_avg_from_grad", "beta2", "exp_avg_sq_weight"),
            *("root_correction", "eps", "step_size", "multiplier"),
        )
    ]


@functools.cache
def library(formats: Formats) -> Library | str:
    """Build the kernel for these formats, or return the reason why it can't be built."""
    return build_library(Path(__file__).with_suffix(".cpp"), formats.macros(CPP_NAMES))


def _step_on_cpu(library: Library, weights: Weights, gradient: Tensor, step: AdamW) -> None:
    tensors = weights.tensors() | {"gradient": gradient}
    vectors = Vectors(**{name: tensor.data_ptr() for name, tensor in tensors.items()})
    beta1, beta2 = step.betas
    weight = ctypes.c_float(1 - beta1).value
    from_grad = weight >= 0.5  # interpolate from the nearer end, like torch.lerp
    scalars = Scalars(
        decay=1 - step.lr * step.weight_decay,
        exp_avg_weight=weight - 1 if from_grad else weight,
        exp_avg_from_grad=from_grad,
        beta2=beta2,
        exp_avg_sq_weight=1 - beta2,
        root_correction=math.sqrt(1 - beta2**step.step),
        eps=step.eps,
        step_size=-step.lr / (1 - beta1**step.step),
        multiplier=step.multiplier,
    )
    library.adamw(
        ctypes.byref(vectors),
        ctypes.byref(scalars),
        ctypes.c_int64(gradient.numel()),
        gomp_parallel(),
        ctypes.c_int32(torch.get_num_threads()),
    )


# The CUDA kernel

BLOCK_ELEMENTS = 16384
"""Number of elements that a block of threads updates, as in adamw.cu."""

THREADS = 256
FACTORS_BYTES = 36
"""Bytes of the struct `Factors` of adamw.cu."""

CUDA_NAMES = DTYPES | {None: "Bf16"}
"""Names of data types in adamw.cu; if there is no copy, any name will do."""


class _Shard(ctypes.Structure):
    """`Shard` of adamw.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("master", "exp_avg", "exp_avg_sq")),
        *((name, ctypes.c_void_p) for name in ("copy", "low_bits", "gradient")),
        *((name, ctypes.c_int64) for name in ("numel", "first_block")),
        *((name, ctypes.c_double) for name in ("lr", "weight_decay")),
    )


class _Params(ctypes.Structure):
    """`AdamwParams` of adamw.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("shards", "shard_of_block", "scalars")),
        *((name, ctypes.c_double) for name in ("beta1", "beta2", "eps")),
    )


def cuda_macros(formats: Formats) -> dict[str, str | int]:
    """Return the preprocessor macros of the kernel."""
    return formats.macros(CUDA_NAMES) | {
        "PARAMS_BYTES": ctypes.sizeof(_Params),
        "SHARD_BYTES": ctypes.sizeof(_Shard),
        "SCALARS_BYTES": 32,
        "FACTORS_BYTES": FACTORS_BYTES,
    }


class ShardTable:
    """Addresses, in GPU memory, of shards of one format; valid until a tensor moves.

    It doesn't keep the tensors alive: gradients are freed between steps.
    """

    def __init__(self, shards: Sequence[Shard], gpu: Gpu) -> None:
        self.gpu = gpu
        self.formats = Formats.from_weights(shards[0].weights)
        counts = [-(-len(shard.gradient) // BLOCK_ELEMENTS) for shard in shards]
        self.num_blocks = sum(counts)
        first_block = 0
        rows: list[_Shard] = []
        for shard, count in zip(shards, counts, strict=True):
            rows.append(_make_row(shard, first_block))
            first_block += count
        content = b"".join(bytes(row) for row in rows)
        shard_of_block = torch.arange(len(shards), dtype=torch.int32)
        shard_of_block = shard_of_block.repeat_interleave(torch.tensor(counts))
        values = memoryview(content).cast("q").tolist()
        # Needs no synchronization: the driver stages a copy this small before returning.
        self.rows = torch.tensor(values, dtype=torch.int64).to(gpu.device, non_blocking=True)
        self.shard_of_block = shard_of_block.to(gpu.device, non_blocking=True)

    def step(self, scalars: Float64[Tensor, "4"], step: AdamW) -> None:
        """Take one in-place step of all shards, with `step_scalars(step)` and its betas and eps.

        The GPU reads the scalars, so a CUDA graph of the call can be replayed with different ones.
        """
        if self.num_blocks == 0:
            return
        params = _Params(
            shards=self.rows.data_ptr(),
            shard_of_block=self.shard_of_block.data_ptr(),
            scalars=scalars.data_ptr(),
            beta1=step.betas[0],
            beta2=step.betas[1],
            eps=step.eps,
        )
        self.gpu.kernel("adamw", "adamw", cuda_macros(self.formats))(
            params, grid=(self.num_blocks, 1, 1), block=(THREADS, 1, 1), shared_bytes=FACTORS_BYTES
        )


def _addresses(shard: Shard) -> tuple[int | float, ...]:
    """Return a shard's addresses, length and factors; tables are valid until they change."""
    return (
        *(tensor.data_ptr() for tensor in shard.weights.tensors().values()),
        *(shard.gradient.data_ptr(), len(shard.gradient), shard.lr, shard.weight_decay),
    )


def _make_row(shard: Shard, first_block: int) -> _Shard:
    vectors = shard.weights.tensors()
    return _Shard(
        **{name: vector.data_ptr() for name, vector in vectors.items()},
        gradient=shard.gradient.data_ptr(),
        numel=len(shard.gradient),
        first_block=first_block,
        lr=shard.lr,
        weight_decay=shard.weight_decay,
    )


def step_scalars(step: AdamW, device: torch.device) -> Float64[Tensor, "4"]:
    """Return the learning rate, both betas to the power of the step, and the multiplier."""
    # Python's powers, as in the reference: torch.pow may round differently.
    powers = [beta**step.step for beta in step.betas]
    numbers = [step.lr, *powers, step.multiplier]
    return torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
