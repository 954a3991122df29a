"""A flat vector of weights that learn: masters, gradients and their optimizer."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeline.config import Kernels, OptimConfig
from pipeline.engine.buffers import BufferPool
from pipeline.engine.flat import FlatParams
from pipeline.engine.gradients import FlatGradients
from pipeline.engine.layout import num_chunks
from pipeline.engine.norms import squared_norms
from pipeline.engine.optim import build_optimizer, steps_in_one_pass
from pipeline.errors import KernelError
from pipeline.kernels.adam import adamw_, prepare
from pipeline.kernels.reference import COPIES, AdamW, Weights, round_weights


class TrainedParams:
    """fp32 masters of a flat vector, of the own piece or whole, with what trains them.

    An fp32 weight that stays where it is computed is its own master.
    """

    def __init__(
        self, flat: FlatParams, pool: BufferPool, optim: OptimConfig, *, kernels: Kernels = "auto"
    ) -> None:
        self.flat, self.comm = flat, flat.comm
        self.kernels: Kernels = kernels
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
        self.one_pass = kernels != "off" and steps_in_one_pass(optim, device)
        if self.one_pass:
            copy = self._copy
            ready = prepare(device, copy=None if copy is None else copy.dtype, kernels=kernels)
            # On a CPU PyTorch has the same bits without a kernel, on a GPU a faster class.
            self.one_pass = ready or device.type == "cpu"
        elif kernels == "required":
            raise KernelError(
                f"kernels required: there is none of {optim.name} on {device.type} with these"
                " settings; set kernels auto, or take AdamW without optim.params"
            )

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
        if self.one_pass:
            self._step_in_one_pass(gradient.to(self.master.device), multiplier)
        else:
            self.master.grad = gradient.to(self.master.device)
            self.optimizer.step()
            self.master.grad = None
        if not sharded:
            self.gradients.pool.give_back(gradient)
        self.gradients.clear()
        if self.one_pass and self._copy is not None:
            self.flat.publish()
        else:
            self.publish()

    def _step_in_one_pass(self, gradient: Tensor, multiplier: float) -> None:
        """What the optimizer would do, the factor and the rounding of the weights included."""
        (settings,) = self.optimizer.param_groups
        master, state = self.master.detach(), self.optimizer.state[self.master]
        if "exp_avg" not in state:
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        if state["step"].is_cuda:  # as PyTorch's fused class has loaded it
            state["step"] = state["step"].cpu()
        state["step"] += 1
        adamw_(
            Weights(master, state["exp_avg"], state["exp_avg_sq"], copy=self._copy),
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

    @property
    def _copy(self) -> Tensor | None:
        """The own weights, where they are a rounding of the masters beside them."""
        if self.flat.disk is not None:
            return None
        own = self.own_weights
        here = own.device == self.flat.placement.optimizer_device
        return own if here and own.dtype in COPIES else None

    def moments(self) -> list[Tensor]:
        """What the optimizer keeps for each weight."""
        state = self.optimizer.state.get(self.master, {})
        return [value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights, on all processes."""
        if self.flat.disk is not None:
            self.flat.disk.write(round_weights(self.master.detach(), self.flat.settings.dtype))
            self.flat.publish()
            return
        self.comm.synchronize()
        own = self.own_weights
        if own.data_ptr() != self.master.data_ptr():
            own.copy_(round_weights(self.master.detach(), own.dtype))
        self.flat.publish()
