"""A flat vector of trained weights: masters, summed gradients and the optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.config import Kernels, OptimConfig
from pipeline.engine.buffers import BufferPool
from pipeline.engine.comm import Work
from pipeline.engine.flat import FlatParams
from pipeline.engine.gradients import FlatGradients
from pipeline.engine.masters import (
    MOMENTS,
    Masters,
    build_optimizer,
    kind_of_masters,
    uses_adamw_kernel,
)
from pipeline.engine.tensor_parts import Stretch, completed, counted
from pipeline.kernels.adamw import COPIES, Kind, Shard, Weights, find, new_moments
from pipeline.parallel.group import ALONE, Group
from pipeline.system.errors import KernelError


class TrainedParams:
    """A flat vector with its masters, summed gradients and optimizer state."""

    def __init__(
        self,
        flat: FlatParams,
        pool: BufferPool,
        optim: OptimConfig,
        *,
        kernels: Kernels = "auto",
        tensor: Group = ALONE,
    ) -> None:
        self.flat, self.comm, self.optim = flat, flat.comm, optim
        self.tensor = tensor
        """The tensor-parallel group of the vector's layers."""
        self.moment_dtype = MOMENTS[optim.moments]
        kind = kind_of_masters(flat.settings.dtype, flat.placement, optim)
        self._by_kernel = uses_adamw_kernel(optim)
        device, dtype = flat.placement.optimizer_device, flat.settings.dtype
        if self._by_kernel:
            copy = dtype if kind == "whole" and dtype in COPIES else None
            formats = Kind(torch.float32, self.moment_dtype, copy, kind == "split")
            find(device, formats, kernels)  # built before the first step
        elif kernels == "required":
            raise KernelError(
                f"kernels required: there is none of {optim.name} on {device.type} with these"
                " settings; set kernels auto, or take AdamW without optim.params"
            )
        self.masters = Masters(flat, kind)
        self.gradients = FlatGradients(flat, pool)
        *_, decay = next(flat.decays(0, 1))  # PyTorch's classes have one for the full vector
        settings = {"lr": flat.settings.lr, "weight_decay": decay}
        self.optimizer = build_optimizer([{"params": [self.masters.param], **settings}], optim)
        self._rounded: Tensor | None = None
        self._gathered_gradient: Tensor | None = None

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state by its own names: moments, and scalars such as `step`."""
        return self.optimizer.state[self.masters.param]

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Replace the optimizer's state."""
        if self.moment_dtype != torch.float32:  # PyTorch's class would convert it to fp32
            self.state.clear()
            self.state.update(state)
            return
        settings = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": {0: state}, "param_groups": settings})

    def moments(self) -> list[Tensor]:
        """The part of the state that is stored for each weight."""
        return list(self.named_moments().values())

    def named_moments(self) -> dict[str, Tensor]:
        """The moments by the optimizer's names."""
        return {name: value for name, value in self._tensors() if value.ndim > 0}

    def counters(self) -> dict[str, float]:
        """The part of the state that is stored once: the number of updates, mostly."""
        return {name: value.item() for name, value in self._tensors() if value.ndim == 0}

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in self.state.items() if isinstance(value, Tensor)]

    @contextmanager
    def changing(self) -> Iterator[Float[Tensor, " n"]]:
        """The fp32 masters, to change in place; the weights of all processes follow at exit."""
        self.comm.synchronize()  # before weights change that are being copied to the GPU
        with self.masters.changing() as masters:
            yield masters
        self.masters.write_weights()
        self.flat.publish()

    def attach(self, master: Tensor, *moments: Tensor) -> None:
        """Use masters and moments that were read from a disk, until `detach`."""
        self.masters.param.data = master
        self.state.setdefault("step", torch.zeros(()))
        names = new_moments(torch.empty(0), self.moment_dtype)
        self.state.update(zip(names, moments, strict=True))

    def detach(self) -> None:
        """Release the masters and moments of `attach`."""
        self.masters.param.data = torch.empty(0)
        self.state.update(new_moments(torch.empty(0), self.moment_dtype))

    def spans(self, *, own: bool = False) -> Iterator[tuple[str, slice, slice]]:
        """Each parameter with elements in these masters: name, place here, elements there.

        With `own` only those that this process writes to a checkpoint.
        """
        flat, first = self.flat, self._first
        low, high = flat.written if own else (first, first + self.masters.numel)
        for name, start, stop in flat.stretches(low, high):
            offset = flat.offsets[name]
            yield name, slice(start - first, stop - first), slice(start - offset, stop - offset)

    def full_gradients(self) -> dict[str, Tensor]:
        """The reduced gradient of each parameter by name; all processes call it.

        With tensor parallelism, of this process's part.
        """
        full = self._gathered(self._gradient())
        whole = {name: view.clone() for name, view in self.flat.cut(full).items()}
        self.gradients.pool.give_back(full)
        return whole

    def _gathered(self, gradient: Tensor) -> Tensor:
        """All-gather the shards of a gradient into a buffer of the pool."""
        full = self.gradients.borrow()
        piece = self.comm.piece(full)
        piece.copy_(gradient)
        self.comm.all_gather(full, piece, self.flat.unit).wait()
        return full

    def _gradient(self) -> Float[Tensor, " n"]:
        """This process's shard of the sum over all micro-batches and processes."""
        self.gradients.settle()
        gradient = self.gradients.sum.finish()
        return completed(gradient, self.flat.settings.role, self.tensor, self._stretches())

    def _stretches(self) -> list[Stretch]:
        """The parameters of this process's shard."""
        flat, first = self.flat, self.comm.rank * self.flat.shard_numel
        return [
            (flat.params[name], start - flat.offsets[name], slice(start - first, stop - first))
            for name, start, stop in flat.stretches(first, first + flat.shard_numel)
        ]

    def counted_gradient(self) -> Float[Tensor, " n"]:
        """The shard of the gradient, with zeros where another process counts the element."""
        return counted(self._gradient(), self.flat.settings.role, self.tensor, self._stretches())

    @property
    def steps_in_place(self) -> bool:
        """True if a step needs no memory beyond the vectors, so that many may be prepared."""
        placement = self.flat.placement
        return (
            placement.device == placement.gradient_device == placement.optimizer_device
            and (placement.shard_optimizer or self.comm.size == 1)
            and not (placement.optimizer_on_disk or placement.params_on_disk)
            and not (placement.shard_params and placement.param_device != placement.device)
        )

    def begin_step(self, *, multiplier: float, lr_share: float) -> list[Shard]:
        """Prepare one step, which the caller runs by the AdamW kernel before `end_step`.

        Other optimizers step here, and return nothing.

        Args:
            multiplier: of the gradient.
            lr_share: of this vector's learning rate.
        """
        (settings,) = self.optimizer.param_groups
        settings["lr"] = self.flat.settings.lr * lr_share
        gradient = self._gradient()
        if not self.flat.placement.shard_optimizer and self.comm.size > 1:
            gradient = self._gathered_gradient = self._gathered(gradient)
        gradient = gradient.to(self.flat.placement.optimizer_device)
        if not self._by_kernel:
            self.masters.param.grad = gradient.mul_(multiplier)
            self.optimizer.step()
            self.masters.param.grad = None
            return []
        self._rounded = self.masters.room_for_weights()
        vectors = self._vectors(gradient, self._rounded)
        lr, first = self.flat.settings.lr, self._first
        places = [
            (slice(start - first, stop - first), rate)
            for start, stop, rate in self.flat.decays(first, first + self.masters.numel)
        ]
        return [
            Shard(weights=vectors.part(place), gradient=gradient[place], lr=lr, weight_decay=rate)
            for place, rate in places
        ]

    def _vectors(self, gradient: Tensor, rounded: Tensor | None) -> Weights:
        """The kernel's arguments; counts the step."""
        state, masters = self.state, self.masters
        if "exp_avg" not in state:
            state["step"] = torch.zeros(())
            state |= new_moments(gradient, self.moment_dtype)
        state["step"] = state["step"].cpu() + 1  # PyTorch's fused class loads it to the GPU
        stepped = masters.fp32() if masters.low_bits is None else masters.weights
        return Weights(stepped, **self.named_moments(), copy=rounded, low_bits=masters.low_bits)

    def end_step(self) -> Work:
        """Drop the gradient and start publishing the changed weights."""
        if self._gathered_gradient is not None:
            self.gradients.pool.give_back(self._gathered_gradient)
            self._gathered_gradient = None
        self.gradients.clear()
        rounded, self._rounded = self._rounded, None
        self.masters.write_weights(rounded)
        return self.flat.start_publishing()

    @property
    def _first(self) -> int:
        """Offset of these masters in the full vector."""
        flat = self.flat
        return flat.comm.rank * flat.shard_numel if flat.placement.shard_optimizer else 0
