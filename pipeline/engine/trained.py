"""A flat vector of weights that learn: masters, gradients and their optimizer."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeline.config import OptimConfig
from pipeline.engine.buffers import BufferPool
from pipeline.engine.flat import FlatParams
from pipeline.engine.gradients import FlatGradients
from pipeline.engine.layout import num_chunks
from pipeline.engine.norms import squared_norms
from pipeline.engine.optim import build_optimizer


class TrainedParams:
    """fp32 masters of a flat vector, of the own piece or whole, with what trains them.

    An fp32 weight that stays where it is computed is its own master.
    """

    def __init__(self, flat: FlatParams, pool: BufferPool, optim: OptimConfig) -> None:
        self.flat, self.comm = flat, flat.comm
        placement = flat.placement
        own = self.own_weights
        device = placement.optimizer_device
        if placement.optimizer_on_disk:
            self.master = nn.Parameter(torch.empty(0))
        elif own.dtype == torch.float32 and own.device == device and flat.disk is None:
            self.master = nn.Parameter(own.data)
        else:
            self.master = nn.Parameter(self.weights_in_fp32())
        self.gradients = FlatGradients(flat, pool)
        settings = {"lr": flat.settings.lr, "weight_decay": flat.settings.weight_decay}
        self.optimizer = build_optimizer([{"params": [self.master], **settings}], optim)

    @property
    def own_weights(self) -> Tensor:
        """The weights whose masters this process keeps: its piece, or all at stage 0."""
        return self.flat.shard if self.flat.placement.shard_optimizer else self.flat.full

    @property
    def masters_are_weights(self) -> bool:
        """Whether the masters have no memory of their own."""
        storage = self.own_weights.untyped_storage()
        return storage.data_ptr() == self.master.untyped_storage().data_ptr() != 0

    def weights_in_fp32(self) -> Tensor:
        """A copy of `own_weights` where the optimizer works, from the disk if they are there."""
        disk = self.flat.disk
        own = self.own_weights if disk is None else disk.read()
        device = self.flat.placement.optimizer_device
        copy = self.flat.placement.host_empty(own.numel(), torch.float32, device).copy_(own)
        if disk is not None:
            disk.give_back()
        return copy

    def attach(self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Have masters and moments that live on a disk here, until `detach`."""
        self.master.data = master
        state = self.optimizer.state[self.master]
        state.setdefault("step", torch.zeros(()))
        state |= {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def detach(self) -> None:
        """Let go of what `attach` brought."""
        self.master.data = torch.empty(0)
        for name in ("exp_avg", "exp_avg_sq"):
            self.optimizer.state[self.master][name] = torch.empty(0)

    def spans(self, *, own: bool = False) -> Iterator[tuple[str, slice, slice]]:
        """Of each parameter that has elements in these masters: where they lie, and which they are.

        With `own` only those of this process's piece, so that processes that all keep everything
        share the vector out among them.
        """
        flat = self.flat
        first = flat.comm.rank * flat.shard_numel if flat.placement.shard_optimizer else 0
        low, high = first, first + self.master_numel
        if own:
            low = flat.comm.rank * flat.shard_numel
            high = low + flat.shard_numel
        for name, start, stop in flat.stretches(low, high):
            offset = flat.offsets[name]
            yield name, slice(start - first, stop - first), slice(start - offset, stop - offset)

    @property
    def master_numel(self) -> int:
        """Elements of the masters, wherever they are."""
        flat = self.flat
        return flat.shard_numel if flat.placement.shard_optimizer else flat.numel

    def full_gradients(self) -> dict[str, Tensor]:
        """The reduced gradient of each parameter, whole, by name; all processes call it."""
        full = self._gathered_gradient()
        whole = {name: view.clone() for name, view in self.flat.cut(full).items()}
        self.gradients.pool.give_back(full)
        return whole

    def _gathered_gradient(self) -> Tensor:
        """The whole reduced gradient, in a buffer of the pool."""
        self.gradients.settle()
        full = self.gradients.borrow()
        piece = self.comm.piece(full)
        piece.copy_(self.gradients.sum.finish())
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
        gradient = self.gradients.sum.finish()
        if multiplier != 1.0:
            gradient.mul_(multiplier)
        if not self.flat.placement.shard_optimizer:
            gradient = self._gathered_gradient()
        self.master.grad = gradient.to(self.master.device)
        for settings in self.optimizer.param_groups:
            settings["lr"] = lr
            if momentum is not None and "betas" in settings:
                settings["betas"] = (momentum, settings["betas"][1])
        self.optimizer.step()
        self.master.grad = None
        if not self.flat.placement.shard_optimizer:
            self.gradients.pool.give_back(gradient)
        self.gradients.clear()
        self.publish()

    def moments(self) -> list[Tensor]:
        """What the optimizer keeps for each weight."""
        state = self.optimizer.state.get(self.master, {})
        return [value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights, on all processes."""
        if self.flat.disk is not None:
            self.flat.disk.write(self.master.detach())
            self.flat.publish()
            return
        self.comm.synchronize()
        own = self.own_weights
        if own.data_ptr() != self.master.data_ptr():
            own.copy_(self.master.detach())
        self.flat.publish()
