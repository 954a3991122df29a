"""A flat vector of trained weights: fp32 master weights, summed gradients and the optimizer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float, Int16
from torch import Tensor

from pipeline.config import Kernels, OptimConfig
from pipeline.engine.comm.collectives import BufferPool, Work
from pipeline.engine.optimizer.gradients import FlatGradients
from pipeline.engine.sharding.flat import FlatParams, Placement
from pipeline.engine.sharding.tensor_parallel import ParamRange, mask_duplicates, reduce_gradient
from pipeline.kernels.adamw import (
    COPY_DTYPES,
    Formats,
    Shard,
    Weights,
    find_kernel,
    join_master,
    new_moments,
    round_weights,
    split_master,
)
from pipeline.parallel.group import SELF_GROUP, Group

MOMENTS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtype of AdamW's moments for each value of the setting `optim.moments`."""

MasterKind = Literal["weights", "split", "separate"]

PIECE = 2**20
"""Number of elements that PyTorch rounds at once, which bounds temporary memory."""


def choose_master_kind(dtype: torch.dtype, placement: Placement) -> MasterKind:
    """Choose the kind of master weights for weights in `dtype`.

    Returns:
        "weights" if the masters are the weights, in fp32 on the optimizer's device; "split" if a
        master is the bf16 weight and 16 more bits; "separate" if they are a separate fp32 vector.
    """
    device = placement.param_device if placement.shard_params else placement.device
    on_disk = placement.params_on_disk or placement.optimizer_on_disk
    if on_disk or device != placement.optimizer_device:
        return "separate"
    if dtype == torch.float32:
        return "weights"
    return "split" if dtype == torch.bfloat16 else "separate"


class Masters:
    """The master weights of the local shard of a flat vector, or of all of it at stage 0."""

    def __init__(self, flat: FlatParams, kind: MasterKind) -> None:
        self.flat, self.kind = flat, kind
        self.low_bits: Int16[Tensor, " n"] | None = None
        placement = flat.placement
        vector = torch.empty(0, dtype=torch.float32, device=placement.optimizer_device)
        if kind == "weights":
            vector = self.weights.data
        elif kind == "split":  # the low bits of loaded weights are zero
            self.low_bits = torch.zeros_like(self.weights, dtype=torch.int16)
        elif not placement.optimizer_on_disk:
            vector = self.from_weights()
        self.vector = vector
        """The masters; empty if they are split or on disk."""

    @property
    def weights(self) -> Tensor:
        """The weights whose masters this process keeps; empty if they are on disk."""
        return self.flat.shard if self.flat.placement.shard_optimizer else self.flat.full

    @property
    def numel(self) -> int:
        """Number of elements of the masters, wherever they are stored."""
        flat = self.flat
        return flat.shard_numel if flat.placement.shard_optimizer else flat.numel

    def fp32(self) -> Float[Tensor, " n"]:
        """Return the masters as one vector, which is a copy if they are split."""
        if self.low_bits is not None:
            return join_master(self.weights, self.low_bits)
        return self.vector

    @contextmanager
    def modify(self) -> Iterator[Float[Tensor, " n"]]:
        """Provide the masters as one vector to modify in place; separate weights don't change."""
        masters = self.fp32()
        yield masters
        if self.low_bits is not None:
            weights, low_bits = split_master(masters)
            self.weights.copy_(weights)
            self.low_bits.copy_(low_bits)

    def separate_tensors(self) -> Iterator[Tensor]:
        """Yield the masters' tensors that are stored separately from the weights."""
        if self.low_bits is not None:
            yield self.low_bits
        elif self.kind == "separate":
            yield self.vector

    def from_weights(self) -> Float[Tensor, " n"]:
        """Return a copy of the weights, which may be on disk, in fp32 on the optimizer's device."""
        disk, placement = self.flat.disk, self.flat.placement
        weights = self.weights if disk is None else disk.read()
        copy = self.flat.comm.empty(weights.numel(), torch.float32, placement.optimizer_device)
        copy.copy_(weights)
        if disk is not None:
            disk.release()
        return copy

    def allocate_rounded(self) -> Tensor | None:
        """Return the tensor for the rounded masters: the weights, or a buffer to copy to them.

        Return None if there is nothing to round.
        """
        flat = self.flat
        if self.kind != "separate" or flat.settings.dtype not in COPY_DTYPES:
            return None
        device = flat.placement.optimizer_device
        if flat.disk is None and (self.weights.device == device or device.type == "cpu"):
            return self.weights  # HostAdamW copies to them
        return flat.comm.empty(self.numel, flat.settings.dtype, device)

    def write_weights(self, rounded: Tensor | None = None) -> None:
        """Update the weights; `rounded` is the filled result of `allocate_rounded`."""
        flat, target = self.flat, self.weights
        if self.kind != "separate" or rounded is target:
            return
        if flat.disk is not None:
            dtype = flat.settings.dtype
            flat.disk.write(round_weights(self.fp32(), dtype) if rounded is None else rounded)
        elif rounded is not None:
            target.copy_(rounded)
        else:
            for weights, masters in zip(target.split(PIECE), self.fp32().split(PIECE), strict=True):
                weights.copy_(round_weights(masters, target.dtype))


class TrainedParams:
    """A flat vector with its masters, summed gradients and optimizer state."""

    def __init__(
        self,
        flat: FlatParams,
        pool: BufferPool,
        optim: OptimConfig,
        *,
        kernels: Kernels = "auto",
        tensor: Group = SELF_GROUP,
    ) -> None:
        self.flat, self.comm, self.optim = flat, flat.comm, optim
        self.tensor = tensor
        """The tensor-parallel group of the vector's layers."""
        self.moment_dtype = MOMENTS[optim.moments]
        device, dtype = flat.placement.optimizer_device, flat.settings.dtype
        kind = choose_master_kind(dtype, flat.placement)
        copy = dtype if kind == "separate" and dtype in COPY_DTYPES else None
        formats = Formats(self.moment_dtype, copy, kind == "split")
        find_kernel(device, formats, kernels)  # compile before the first step
        self.masters = Masters(flat, kind)
        self.gradients = FlatGradients(flat, pool)
        self.state: dict[str, Tensor] = {}
        """Moments and the number of updates, `step`, under the names that PyTorch's AdamW uses."""
        self._rounded: Tensor | None = None
        self._gathered_gradient: Tensor | None = None
        self._completed: Tensor | None = None
        """The gradient of `norm_gradient`, if it was summed over tensor-parallel processes."""

    def named_moments(self) -> dict[str, Tensor]:
        """Return the moments by name."""
        return {name: value for name, value in self.state.items() if value.ndim > 0}

    def counters(self) -> dict[str, float]:
        """Return the number of updates, named `step`; may be empty before the first update."""
        return {name: value.item() for name, value in self.state.items() if value.ndim == 0}

    @contextmanager
    def modify(self) -> Iterator[Float[Tensor, " n"]]:
        """Provide the fp32 masters to modify in place; on exit, publish the new weights."""
        self.comm.synchronize()  # finish pending copies to the GPU before weights change
        with self.masters.modify() as masters:
            yield masters
        self.masters.write_weights()
        self.flat.publish()

    def attach(self, master: Tensor, *moments: Tensor) -> None:
        """Use masters and moments that were read from disk, until `detach`."""
        self.masters.vector = master
        self.state.setdefault("step", torch.zeros(()))
        names = new_moments(torch.empty(0), self.moment_dtype)
        self.state.update(zip(names, moments, strict=True))

    def detach(self) -> None:
        """Release the masters and moments passed to `attach`."""
        self.masters.vector = torch.empty(0)
        self.state.update(new_moments(torch.empty(0), self.moment_dtype))

    def param_spans(self, *, saved_only: bool = False) -> Iterator[tuple[str, slice, slice]]:
        """Yield (name, range in the masters, range in the parameter) of each parameter.

        With `saved_only`, yield only the elements that this process writes to a checkpoint.
        """
        flat, first = self.flat, self._offset
        low, high = flat.checkpoint_range if saved_only else (first, first + self.masters.numel)
        for name, start, stop in flat.param_ranges(low, high):
            offset = flat.offsets[name]
            yield name, slice(start - first, stop - first), slice(start - offset, stop - offset)

    def _all_gather(self, gradient: Tensor) -> Tensor:
        """All-gather the shards of a gradient into a buffer of the pool."""
        full = self.gradients.pool.acquire(self.flat.numel, torch.float32)
        shard = self.comm.local_shard(full)
        shard.copy_(gradient)
        self.comm.all_gather(full, shard, self.flat.unit).wait()
        return full

    def _gradient(self) -> Float[Tensor, " n"]:
        """Return this process's shard of the sum over all micro-batches and processes."""
        self.gradients.finish_reduction()
        gradient = self.gradients.sum.finish()
        return reduce_gradient(gradient, self.flat.settings.role, self.tensor, self._param_ranges())

    def _param_ranges(self) -> list[ParamRange]:
        """List the parameters in this process's shard."""
        flat, first = self.flat, self.comm.rank * self.flat.shard_numel
        return [
            (flat.params[name], start - flat.offsets[name], slice(start - first, stop - first))
            for name, start, stop in flat.param_ranges(first, first + flat.shard_numel)
        ]

    def norm_gradient(self) -> Float[Tensor, " n"]:
        """Return the gradient's shard, with zeros for elements that another process counts."""
        role, ranges = self.flat.settings.role, self._param_ranges()
        gradient = self._gradient()
        if self.tensor.size > 1 and role in ("partial", "overlapping"):
            self._completed = gradient
        return mask_duplicates(gradient, role, self.tensor, ranges)

    @property
    def steps_in_place(self) -> bool:
        """True if a step allocates no memory, so that several vectors can be updated at once."""
        placement = self.flat.placement
        return (
            placement.device == placement.gradient_device == placement.optimizer_device
            and (placement.shard_optimizer or self.comm.size == 1)
            and not (placement.optimizer_on_disk or placement.params_on_disk)
            and not (placement.shard_params and placement.param_device != placement.device)
        )

    def prepare_step(self) -> list[Shard]:
        """Prepare one step, after `norm_gradient`; the caller then runs AdamW on the result."""
        gradient = self._gradient() if self._completed is None else self._completed
        if not self.flat.placement.shard_optimizer and self.comm.size > 1:
            gradient = self._gathered_gradient = self._all_gather(gradient)
        device = self.flat.placement.optimizer_device
        if device.type != "cpu":  # otherwise HostAdamW copies it in chunks
            gradient = gradient.to(device)
        state, masters = self.state, self.masters
        stepped = masters.fp32() if masters.low_bits is None else masters.weights
        if "exp_avg" not in state:
            state["step"] = torch.zeros(())
            state |= new_moments(stepped, self.moment_dtype)
        state["step"] = state["step"].cpu() + 1  # PyTorch's fused AdamW loads it to the GPU
        self._rounded = copy = masters.allocate_rounded()
        vectors = Weights(stepped, **self.named_moments(), copy=copy, low_bits=masters.low_bits)
        lr, first = self.flat.settings.lr, self._offset
        shards: list[Shard] = []
        for start, stop, rate in self.flat.decay_ranges(first, first + self.masters.numel):
            span = slice(start - first, stop - first)
            weights = vectors.narrow(span)
            shards.append(Shard(weights=weights, gradient=gradient[span], lr=lr, weight_decay=rate))
        return shards

    def finish_step(self) -> Work:
        """Drop the gradient and start publishing the changed weights."""
        if self._gathered_gradient is not None:
            self.gradients.pool.release(self._gathered_gradient)
            self._gathered_gradient = None
        self.clear_gradient()
        rounded, self._rounded = self._rounded, None
        self.masters.write_weights(rounded)
        return self.flat.start_publishing()

    def clear_gradient(self) -> None:
        """Discard the gradient, after a step or instead of it."""
        self._completed = None
        self.gradients.clear()

    @property
    def _offset(self) -> int:
        """Offset of these masters in the full vector."""
        flat = self.flat
        return flat.comm.rank * flat.shard_numel if flat.placement.shard_optimizer else 0
