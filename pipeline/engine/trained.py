"""A flat vector of weights that learn: masters, gradients and their optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.config import Kernels, OptimConfig
from pipeline.engine.buffers import BufferPool
from pipeline.engine.flat import FlatParams
from pipeline.engine.gradients import FlatGradients
from pipeline.engine.layout import num_chunks
from pipeline.engine.masters import Kind, Masters, kind_of_masters
from pipeline.engine.norms import squared_norms
from pipeline.engine.optim import build_optimizer, steps_in_one_pass
from pipeline.errors import KernelError
from pipeline.kernels.adam import adamw_, prepare
from pipeline.kernels.reference import COPIES, AdamW, Weights


class TrainedParams:
    """A flat vector with what trains it: masters, summed gradients and an optimizer."""

    def __init__(
        self, flat: FlatParams, pool: BufferPool, optim: OptimConfig, *, kernels: Kernels = "auto"
    ) -> None:
        self.flat, self.comm = flat, flat.comm
        self.kernels: Kernels = kernels
        kind = kind_of_masters(flat.settings.dtype, flat.placement, optim, kernels)
        self.one_pass = self._prepare(optim, kind)
        # On a GPU a kernel may not be there, which on a CPU PyTorch stands in for.
        self.masters = Masters(flat, "whole" if kind == "split" and not self.one_pass else kind)
        self.gradients = FlatGradients(flat, pool)
        settings = {"lr": flat.settings.lr, "weight_decay": flat.settings.weight_decay}
        self.optimizer = build_optimizer([{"params": [self.masters.param], **settings}], optim)

    def _prepare(self, optim: OptimConfig, kind: Kind) -> bool:
        """Whether the optimizer steps in one pass, with the kernel for it ready where one is."""
        device, dtype = self.flat.placement.optimizer_device, self.flat.settings.dtype
        if self.kernels != "off" and steps_in_one_pass(optim, device):
            copy = dtype if kind == "whole" and dtype in COPIES else None
            ready = prepare(device, copy=copy, split=kind == "split", kernels=self.kernels)
            # On a CPU PyTorch has the same bits without a kernel, on a GPU a faster class.
            return ready or device.type == "cpu"
        if self.kernels == "required":
            raise KernelError(
                f"kernels required: there is none of {optim.name} on {device.type} with these"
                " settings; set kernels auto, or take AdamW without optim.params"
            )
        return False

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer keeps, by its own names: moments, and numbers for all weights."""
        return self.optimizer.state[self.masters.param]

    @contextmanager
    def changing(self) -> Iterator[Float[Tensor, " n"]]:
        """The fp32 masters, to change in place; then the weights follow, on all processes."""
        self.comm.synchronize()  # before weights change that are being copied to the GPU
        with self.masters.changing() as masters:
            yield masters
        self.publish()

    def attach(self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Have masters and moments that live on a disk here, until `detach`."""
        self.masters.param.data = master
        self.state.setdefault("step", torch.zeros(()))
        self.state.update(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)

    def detach(self) -> None:
        """Let go of what `attach` brought."""
        self.masters.param.data = torch.empty(0)
        self.state.update(exp_avg=torch.empty(0), exp_avg_sq=torch.empty(0))

    def spans(self, *, own: bool = False) -> Iterator[tuple[str, slice, slice]]:
        """Of each parameter that has elements in these masters: where they lie, and which they are.

        With `own` only those of this process's piece, so that processes that all keep everything
        share the vector out among them.
        """
        flat = self.flat
        first = flat.comm.rank * flat.shard_numel if flat.placement.shard_optimizer else 0
        low, high = first, first + self.masters.numel
        if own:
            low = flat.comm.rank * flat.shard_numel
            high = low + flat.shard_numel
        for name, start, stop in flat.stretches(low, high):
            offset = flat.offsets[name]
            yield name, slice(start - first, stop - first), slice(start - offset, stop - offset)

    def full_gradients(self) -> dict[str, Tensor]:
        """The reduced gradient of each parameter, whole, by name; all processes call it."""
        self.gradients.settle()
        full = self._gathered(self.gradients.sum.finish())
        whole = {name: view.clone() for name, view in self.flat.cut(full).items()}
        self.gradients.pool.give_back(full)
        return whole

    def _gathered(self, gradient: Tensor) -> Tensor:
        """The whole vector of which each process has its piece, in a buffer of the pool."""
        full = self.gradients.borrow()
        piece = self.comm.piece(full)
        piece.copy_(gradient)
        self.comm.all_gather(full, piece, self.flat.unit).wait()
        return full

    def squared_norms(self) -> Tensor:
        """Sums of squares of the reduced gradient by stretches, of all processes' pieces.

        Float64, of `num_chunks` values; the other processes' stretches are zero.
        """
        self.gradients.settle()
        rows = num_chunks(self.comm.world_size)
        local = squared_norms(self.gradients.sum.finish(), rows // self.comm.world_size)
        values = torch.zeros(rows, dtype=torch.float64, device=local.device)
        self.comm.piece(values).copy_(local)
        return values

    def step(self, *, multiplier: float, lr: float, momentum: float | None = None) -> None:
        """Update the masters with the summed gradient times `multiplier`, then the weights.

        `momentum` replaces the optimizer's beta1 where a schedule cycles it.
        """
        self.comm.synchronize()  # before weights change that are being copied to the GPU
        (settings,) = self.optimizer.param_groups
        settings["lr"] = lr
        if momentum is not None and "betas" in settings:
            settings["betas"] = (momentum, settings["betas"][1])
        sharded = self.flat.placement.shard_optimizer
        self.gradients.settle()
        gradient = self.gradients.sum.finish()
        if multiplier != 1.0 and not self.one_pass:
            gradient.mul_(multiplier)
        if not sharded:
            gradient = self._gathered(gradient)
        device = self.flat.placement.optimizer_device
        rounded: Tensor | None = None
        if self.one_pass:
            rounded = self._step_in_one_pass(gradient.to(device), multiplier)
        else:
            self.masters.param.grad = gradient.to(device)
            self.optimizer.step()
            self.masters.param.grad = None
        if not sharded:
            self.gradients.pool.give_back(gradient)
        self.gradients.clear()
        self.publish(rounded)

    def _step_in_one_pass(self, gradient: Tensor, multiplier: float) -> Tensor | None:
        """What the optimizer would do, the factor and the rounding of the weights included.

        Returns:
            The rounded weights, where the masters are others than these.
        """
        (settings,) = self.optimizer.param_groups
        state, masters = self.state, self.masters
        if "exp_avg" not in state:
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(gradient) for name in ("exp_avg", "exp_avg_sq")}
        if state["step"].is_cuda:  # as PyTorch's fused class has loaded it
            state["step"] = state["step"].cpu()
        state["step"] += 1
        rounded = masters.room_for_weights()
        stepped = masters.fp32() if masters.low_bits is None else masters.weights
        adamw_(
            Weights(
                stepped,
                state["exp_avg"],
                state["exp_avg_sq"],
                copy=rounded,
                low_bits=masters.low_bits,
            ),
            gradient,
            AdamW(
                lr=settings["lr"],
                betas=settings["betas"],
                eps=settings["eps"],
                weight_decay=settings["weight_decay"],
                step=int(state["step"].item()),
                multiplier=multiplier,
            ),
            kernels=self.kernels,
        )
        return rounded

    def moments(self) -> list[Tensor]:
        """What the optimizer keeps for each weight."""
        state = self.state.values()
        return [value for value in state if isinstance(value, Tensor) and value.ndim > 0]

    def publish(self, rounded: Tensor | None = None) -> None:
        """Have the weights follow the masters, on all processes; `rounded` is them already."""
        self.masters.write_weights(rounded)
        self.flat.publish()
