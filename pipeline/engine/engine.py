"""The training engine: a model, its optimizer and the collectives between processes."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pipeline.config import Kernels, OptimConfig, TrainedModelConfig
from pipeline.engine.comm.collectives import BufferPool
from pipeline.engine.comm.copies import make_collectives
from pipeline.engine.optimizer.gradients import (
    MAX_HOST_SUMS,
    LossScaler,
    NormReducer,
    chunk_squares,
)
from pipeline.engine.optimizer.host_adamw import HostAdamW
from pipeline.engine.optimizer.trained import TrainedParams
from pipeline.engine.setup import build_units, get_placement, store_on_disk
from pipeline.engine.zero import ZeroModel
from pipeline.kernels.adamw import AdamW, FlatAdamW, Shard
from pipeline.kernels.host_allocator import keep_freed_memory, return_freed_memory
from pipeline.kernels.pinned_memory import pinned_empty
from pipeline.parallel.device import local_device
from pipeline.parallel.group import SELF_GROUP, Group
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import ConfigError, DivergedError
from pipeline.system.faults import fault_point

Kind = Literal["weights", "masters", "moments", "gradients"]
KINDS: tuple[Kind, ...] = ("weights", "masters", "moments", "gradients")


class StateOffload:
    """Moves storages to host memory and back, to free device memory in between.

    Only the bytes of a storage are moved, so every view of it stays valid.
    """

    def __init__(self, zero: ZeroModel, groups: list[TrainedParams]) -> None:
        self.zero, self.groups = zero, groups
        self._offloaded: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    @property
    def num_bytes(self) -> int:
        """Number of bytes that are currently offloaded to host memory."""
        return sum(copy.nbytes() for _, copy in self._offloaded)

    def offload(self, kinds: Collection[Kind]) -> None:
        """Move the tensors of these kinds to host memory.

        Masters that are the weights themselves move with the weights; the low bits of
        split masters move as masters.
        """
        offloaded = {storage.data_ptr() for storage, _ in self._offloaded}
        for tensor in self._tensors(kinds):
            storage = tensor.untyped_storage()
            on_device = storage.device == local_device() and storage.nbytes() > 0
            if not on_device or not storage.resizable() or storage.data_ptr() in offloaded:
                continue
            offloaded.add(storage.data_ptr())
            allocate = pinned_empty if storage.device.type == "cuda" else torch.empty
            copy = allocate(storage.nbytes(), dtype=torch.uint8)
            copy.untyped_storage().copy_(storage)
            self._offloaded.append((storage, copy.untyped_storage()))
        self.zero.is_offloaded = True
        if "weights" in kinds:
            self.zero.detach_params()
        for storage, _ in self._offloaded:
            storage.resize_(0)

    def reload(self) -> None:
        """Move everything back."""
        for storage, copy in self._offloaded:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._offloaded.clear()
        self.zero.attach_params()

    def _tensors(self, kinds: Collection[Kind]) -> Iterator[Tensor]:
        if "weights" in kinds:
            for flat in self.zero.flats:
                yield from (flat.full, flat.shard)
        for group in self.groups:
            if "masters" in kinds:
                yield from group.masters.separate_tensors()
            if "moments" in kinds:
                yield from group.named_moments().values()
            if "gradients" in kinds:
                yield from group.gradients.sum.tensors()


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping; not finite if the step was skipped."""

    lr: float
    """Learning rate of the step; with LoRA, the adapters' rate, not a fully trained head's."""

    skipped: bool
    """True if the gradient was not finite and nothing was changed."""


class NonFiniteGradientError(DivergedError):
    """Gradients were infinite or NaN for many steps in a row, or at the lowest loss scale."""


class Engine:
    """Trains one model on the processes of a group.

    The loop calls `engine(...)` and `engine.backward(loss)` once per micro-batch, then
    `engine.step()`. No other code uses the gradients of the parameters. They are summed, not
    averaged, over micro-batches and processes: losses are already divided by the number of tokens
    (or pairs) of the whole optimizer step, so that every token has the same weight however the step
    is split. Lower-precision weights have fp32 master weights and fp32 sums of gradients.

    At every `config.zero_stage` a process keeps only its shard of the summed gradients; from stage
    1 on, also only its shard of master weights and moments; and at stage 3, between uses, only its
    shard of the weights. The results are bitwise identical.

    `name`, the same on all processes, labels its collectives: if some process uses two engines
    in a different order, the error names both. `group` defaults to `current_mesh().data`. If the
    model is a pipeline stage or a tensor-parallel shard, `model_parallel` is the group of processes
    that together hold the full model: they compute one gradient norm, and all take or all skip a
    step. `tensor` is the tensor-parallel group, and `stages` the pipeline group.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainedModelConfig,
        *,
        total_steps: int,
        name: str = "engine",
        group: Group | None = None,
        model_parallel: Group = SELF_GROUP,
        tensor: Group = SELF_GROUP,
        stages: Group = SELF_GROUP,
    ) -> None:
        self.model = model
        self.optim: OptimConfig = config.optim
        _, self.peak_lr = config.peak_lr
        self.total_steps = total_steps
        self.lr_scale = 1.0
        """Factor applied to the scheduled learning rates, set by the training loop."""
        self.steps = 0
        """Number of applied steps; skipped ones do not advance the schedule."""
        self.max_skipped = config.zero.max_skipped_steps
        self.skipped_in_a_row = 0
        device = local_device()
        if device.type == "cpu":
            keep_freed_memory()
        self.sharded = config.zero_stage == 3
        """True if weights are sharded between uses."""
        self.group = group or current_mesh().data
        self.comm = make_collectives(device, config.zero, self.group, name=name)
        self.pool = BufferPool(self.comm, device)
        placement = get_placement(config, device)
        units = build_units(model, config, self.comm, self.pool, placement, tensor)
        self.zero = ZeroModel(model, units, self.comm)
        return_freed_memory()  # of the loaded weights, which the units have copied
        self.groups: list[TrainedParams] = [params for unit in units for params in unit.trained]
        if not self.groups:
            raise ConfigError("no parameter of the model is trainable; check lora.targets")
        self.disk = store_on_disk(self.groups, config, self.group.global_rank)
        self.model_parallel, self.tensor, self.stages = model_parallel, tensor, stages
        self._norm_reducer = NormReducer(model_parallel, [group.flat.unit for group in self.groups])
        self._kernels: Kernels = config.kernels
        self._flat_adamw = FlatAdamW()
        on_host = placement.optimizer_device != device
        self._host_adamw = HostAdamW(device) if on_host else None
        self.state_offload = StateOffload(self.zero, self.groups)
        # Include frozen weights: gradients of fp32 adapters flow through the fp16 base.
        is_fp16 = any(param.dtype == torch.float16 for param in model.parameters())
        self.scaler = LossScaler(enabled=is_fp16, config=config.fp16)

    @property
    def updates(self) -> int:
        """Number of weight updates."""
        return self.zero.updates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the model's forward pass."""
        fault_point("engine.forward")
        return self.model(*args, **kwargs)

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Add the gradient of `loss`, summed over processes, to the accumulated gradients."""
        fault_point("engine.backward")
        self.zero.backward([loss * self.scaler.scale if loss.requires_grad else loss])

    def backward_from(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], *, blocks_only: bool = False
    ) -> None:
        """Backpropagate from the model's outputs with given gradients of the loss.

        The gradients are already multiplied by this engine's loss scale. With `blocks_only` the
        graph contains only the model's blocks.
        """
        fault_point("engine.backward")
        self.zero.backward(outputs, gradients, reaches_root=not blocks_only)

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context manager that gathers all weights on every process."""
        return self.zero.gathered()

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clip the summed gradients, apply them if they are finite, and clear them.

        Raises:
            NonFiniteGradientError: many steps in a row, or one at the lowest scale, were skipped.
        """
        fault_point("engine.step")
        self.zero.check_ready()
        self.zero.flush()
        self.zero.reduce()
        grad_norm, bad_unit = self._grad_norm()
        finite = grad_norm < float("inf")  # also False for NaN
        factor = self.optim.lr_factor(self.steps, total_steps=self.total_steps) * self.lr_scale
        if finite:
            self._update(grad_norm, factor)
            self.steps += 1
            self.zero.updates += 1
        self.scaler.update(finite=finite)
        for group in self.groups:
            group.clear_gradient()
        self.pool.free_unused()
        self.comm.end_step()
        self._raise_if_diverged(finite=finite, unit=bad_unit)
        return StepResult(grad_norm=grad_norm, lr=self.peak_lr * factor, skipped=not finite)

    def discard(self) -> None:
        """Discard the accumulated gradients."""
        self.zero.discard()

    def offload_states(self, kinds: Collection[Kind] = KINDS) -> None:
        """Move weights, masters, moments or gradients to host memory until `reload_states`.

        Use it between the phases of a step with several models; accumulated gradients are kept.
        Tensors already in host memory stay there.
        """
        self.zero.flush()
        self.state_offload.offload(kinds)

    def reload_states(self) -> None:
        """Move everything back to the device."""
        self.state_offload.reload()

    def masters(self) -> Iterator[Tensor]:
        """Iterate over this process's shards of the master weights, one per flat vector.

        Read or copy each shard before requesting the next: its memory may be reused.
        """
        self.zero.check_ready()
        return (group.masters.fp32() for group in self.iter_groups())

    @torch.no_grad()
    def load_masters(self, masters: Sequence[Tensor]) -> None:
        """Set the weights to a copy of earlier `masters`, or to an average of several."""
        self.zero.check_ready()
        self.zero.updates += 1
        for group, master in zip(self.iter_groups(), masters, strict=True):
            with group.modify() as current:
                current.copy_(master)

    def iter_gathered_units(self) -> Iterator[list[nn.Parameter]]:
        """Yield each unit's parameters, gathered on all processes until the next is requested."""
        for unit in self.zero.iter_gathered():
            yield [param for flat in unit.flats for param in flat.params.values()]

    def iter_groups(self) -> Iterator[TrainedParams]:
        """Yield each trained flat vector, after reading masters and moments that are on disk."""
        if self.disk is None:
            yield from self.groups
            return
        for index, tensors in self.disk.stream(range(len(self.groups))):
            self.groups[index].attach(*tensors)
            yield self.groups[index]
            self.groups[index].detach()

    def _grad_norm(self) -> tuple[float, str]:
        """Return the global gradient norm and, if it is not finite, the first unit responsible."""
        device = local_device()
        by_group = [chunk_squares(group.norm_gradient(), group.comm) for group in self.groups]
        packed = torch.cat([squares.to(device) for squares in by_group])
        self.comm.all_reduce(packed)
        chunks = packed.view(len(by_group), -1)
        sums = packed if chunks.shape[1] <= MAX_HOST_SUMS else chunks.sum(1)
        local = sums.tolist()  # the only device-to-host copy between forward pass and update
        squares = self._norm_reducer.reduce(local)
        bad = next((i for i, value in enumerate(squares) if not math.isfinite(value)), None)
        if bad is not None:
            chunks_per_vector = len(squares) // len(self._norm_reducer.units)
            return math.nan, self._norm_reducer.units[bad // chunks_per_vector]
        # fsum rounds once, so the result doesn't depend on the order of units.
        return math.sqrt(math.fsum(squares)) / self.scaler.scale, ""

    def _update(self, grad_norm: float, lr_factor: float) -> None:
        limit = self.optim.max_grad_norm
        clip = 1.0 if limit is None else min(1.0, limit / (grad_norm + 1e-6))
        multiplier = clip / self.scaler.scale
        self.comm.synchronize()  # finish pending copies to the GPU before weights change
        prepared: dict[TrainedParams, list[Shard]] = {}
        for group in self.iter_groups():
            prepared[group] = group.prepare_step()
            if not group.steps_in_place:
                self._finish_update(prepared, multiplier, lr_factor)
                prepared.clear()
        self._finish_update(prepared, multiplier, lr_factor)

    def _finish_update(
        self, prepared: Mapping[TrainedParams, list[Shard]], multiplier: float, lr_factor: float
    ) -> None:
        """Run AdamW on the vectors (on a GPU in one launch) and publish the new weights."""
        shards = [shard for group_shards in prepared.values() for shard in group_shards]
        if shards:
            group = next(iter(prepared))
            step = AdamW(
                lr=lr_factor,
                betas=self.optim.betas,
                eps=self.optim.eps,
                weight_decay=0.0,  # set per shard
                step=int(group.state["step"].item()),
                multiplier=multiplier,
            )
            adamw = self._flat_adamw if group.steps_in_place else self._host_adamw or FlatAdamW()
            adamw.step(shards, step, kernels=self._kernels)
        for work in [group.finish_step() for group in prepared]:
            work.wait()

    def _raise_if_diverged(self, *, finite: bool, unit: str) -> None:
        if finite or self.scaler.is_searching:
            self.skipped_in_a_row = 0  # overflows are expected during the search for a scale
        else:
            self.skipped_in_a_row += 1
        if self.scaler.is_exhausted:
            raise NonFiniteGradientError(
                f"the gradient of {unit} overflows fp16 even at the smallest loss scale,"
                f" {self.scaler.scale:g}; train with precision bf16 or fp32"
            )
        if self.skipped_in_a_row >= self.max_skipped:
            steps = f" for {self.max_skipped} steps in a row, last" if self.max_skipped > 1 else ""
            raise NonFiniteGradientError(
                f"the gradient was infinite or NaN{steps} in {unit}; lower the learning rate"
                " or, with precision fp16, use bf16 or fp32"
            )


class FrozenEngine:
    """Runs a frozen model, sharded and offloaded like a trained model with the settings `like`.

    At stage 3 a process keeps its shard of the weights and gathers each block before using it;
    at lower stages the model is unchanged. `name` labels the collectives.
    """

    def __init__(
        self, model: nn.Module, like: TrainedModelConfig, *, name: str = "frozen engine"
    ) -> None:
        self.model = model.requires_grad_(False)
        self._zero: ZeroModel | None = None
        if like.zero_stage == 3:
            device = local_device()
            comm = make_collectives(device, like.zero, current_mesh().data, name=name)
            placement = get_placement(like, device)
            units = build_units(model, like, comm, BufferPool(comm, device), placement)
            self._zero = ZeroModel(model, units, comm)

    @property
    def updates(self) -> int:
        """Number of weight updates; always 0 for a frozen model."""
        return 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the model's forward pass."""
        return self.model(*args, **kwargs)

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context manager that gathers all weights on every process."""
        return nullcontext() if self._zero is None else self._zero.gathered()
