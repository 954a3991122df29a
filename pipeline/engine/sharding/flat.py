"""Parameters of one unit and one kind as one flat vector: the engine's data structure.

The vector has one equal shard per process. The ZeRO stage (Rajbhandari et al. 2020) determines
what a process keeps between uses: all or its shard. As in FSDP, no vector spans two blocks.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.engine.comm.collectives import Collectives, CompletedWork, Work
from pipeline.engine.sharding.offload import DiskShard, WeightDisk
from pipeline.engine.sharding.tensor_parallel import Role

ALIGNMENT = 16
"""Splitting a flat vector at multiples of this number of elements changes no bit of an update.

The fused CPU kernels of Adam, AdamW and SGD process a vector in SIMD lanes of 8, and the remaining
elements one by one with different rounding: which elements remain depends on where the vector was
split. 16 elements are a cache line, at whose multiples the kernels divide a vector among threads.
All other implementations give the same bits for any split.
"""

CHUNKS = 16
"""Number of equal ranges of a vector, each with one sum for the gradient norm; see `num_chunks`."""


def num_chunks(world_size: int) -> int:
    """Return the number of chunks per vector: CHUNKS, or more if `world_size` doesn't divide it."""
    return math.lcm(CHUNKS, world_size)


def lay_out(params: Mapping[str, nn.Parameter], *, decay: bool) -> tuple[dict[str, int], int, int]:
    """Return each parameter's offset, the start of those without weight decay, and the size.

    One-dimensional parameters (biases and norms) have no weight decay. They follow the others, from
    an offset where the vector may be split, so that updating both parts at once gives the same bits
    as separate updates.
    """
    decayed = [name for name, param in params.items() if decay and param.ndim > 1]
    not_decayed = [name for name in params if name not in decayed]
    offsets: dict[str, int] = {}
    end = no_decay_start = 0
    for name in [*decayed, *not_decayed]:
        if name in not_decayed[:1]:
            end = no_decay_start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets[name] = end
        end += params[name].numel()
    return offsets, no_decay_start if not_decayed else end, end


@dataclass(frozen=True)
class ParamSettings:
    """Settings that all parameters of a vector share."""

    dtype: torch.dtype
    trained: bool
    lr: float

    weight_decay: float
    """Weight decay of parameters with more than one dimension; others have none."""

    role: Role = "replicated"
    """Role among the processes of a tensor-parallel group."""


@dataclass(frozen=True)
class Placement:
    """Device and sharding of all states of a process, by ZeRO stage and offload."""

    device: torch.device
    """Device of the computation."""

    shard_optimizer: bool
    """Whether masters and moments are kept for the local shard only: stage 1 and above."""

    shard_params: bool
    """Whether only the local shard of the weights is kept between uses: stage 3."""

    optimizer_device: torch.device
    gradient_device: torch.device
    """Device on which gradients are summed."""

    param_device: torch.device
    """Device of the local shard of the weights at stage 3."""

    params_on_disk: bool
    """Whether the local shard of the weights is on disk, at stage 3."""

    optimizer_on_disk: bool
    """Whether masters and moments are on disk."""

    deterministic: bool
    """Whether the gradients of micro-batches are summed in a binary tree."""


class FlatParams:
    """Weights of one kind in one unit: gathered for use, and at stage 3 freed between uses.

    While freed, the module's parameters keep their shape and dtype; every element is NaN (0 in an
    integer dtype), and an in-place change raises an error.
    """

    def __init__(
        self,
        unit: str,
        params: Mapping[str, nn.Parameter],
        settings: ParamSettings,
        comm: Collectives,
        placement: Placement,
        disk: WeightDisk | None = None,
    ) -> None:
        self.unit, self.settings, self.comm, self.placement = unit, settings, comm, placement
        self.offsets, self.no_decay_start, used = lay_out(params, decay=settings.weight_decay > 0)
        self.params = {name: params[name] for name in self.offsets}
        multiple = num_chunks(comm.size) * ALIGNMENT
        self.numel = -(-used // multiple) * multiple
        if self.no_decay_start == used:  # weight decay applies to all
            self.no_decay_start = self.numel
        self.shard_numel = self.numel // comm.size
        device = placement.device
        self.is_resident = not placement.shard_params or (
            comm.size == 1 and disk is None and placement.param_device == device
        )
        """Whether the shard is part of the full vector, which is never freed."""
        self.disk: DiskShard | None = None
        if disk is not None:
            name = next(iter(self.params), unit)  # the first parameter's name, which is unique
            self.disk = disk.allocate(name, self.shard_numel, settings.dtype)
        if self.is_resident:
            self.full = comm.empty(self.numel, settings.dtype, device)
            self.shard = comm.local_shard(self.full)
        else:
            self.full = torch.empty(self.numel, dtype=settings.dtype, device=device)
            # A shard on disk takes no memory: see `_load` and `start_gather`.
            size = self.shard_numel if self.disk is None else 0
            self.shard = comm.empty(size, settings.dtype, placement.param_device)
        # Views of `.data` have separate version counters, so that refilling the vector between
        # forward and backward doesn't invalidate the tensors that autograd saved.
        self.views = self.unflatten(self.full.data)
        fill_value = float("nan") if settings.dtype.is_floating_point else 0
        scalar = torch.full((), fill_value, dtype=settings.dtype, device=device)
        self.placeholders = {name: scalar.expand(param.shape) for name, param in params.items()}
        self.gathered = True
        self._work: Work | None = None
        self._load()

    def _load(self) -> None:
        """Copy the local part of the parameters and make them views of the vector."""
        self.fill(
            lambda name, start, out: out.copy_(
                self.params[name].detach().reshape(-1)[start : start + len(out)]
            )
        )
        for name, param in self.params.items():
            param.data = self.views[name]
        self.free()

    def fill(self, read: Callable[[str, int, Tensor], object]) -> None:
        """Fill the local part of each parameter using `read(name, start, out)`.

        `read` fills `out` with the elements of the flattened parameter that begin at `start`.
        """
        local = self.shard if self.placement.shard_params else self.full
        if self.disk is not None:
            local = torch.empty(self.shard_numel, dtype=self.settings.dtype)
        first = self.comm.rank * self.shard_numel if self.placement.shard_params else 0
        local.zero_()
        for name, start, stop in self.param_ranges(first, first + local.numel()):
            read(name, start - self.offsets[name], local[start - first : stop - first])
        if self.disk is not None:
            self.disk.write(local)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of a vector of this layout, one per parameter, in the parameter's shape."""
        return {
            name: vector[self.offsets[name] : self.offsets[name] + param.numel()].view(param.shape)
            for name, param in self.params.items()
        }

    @property
    def gaps(self) -> list[slice]:
        """Ranges between and after the parameters."""
        ends = [self.offsets[name] + param.numel() for name, param in self.params.items()]
        starts = [*self.offsets.values(), self.numel][1:]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def param_ranges(self, low: int, high: int) -> Iterator[tuple[str, int, int]]:
        """Yield each parameter with elements between two offsets: its name, start and stop."""
        for name, param in self.params.items():
            offset = self.offsets[name]
            start, stop = max(offset, low), min(offset + param.numel(), high)
            if start < stop:
                yield name, start, stop

    def decay_ranges(self, low: int, high: int) -> Iterator[tuple[int, int, float]]:
        """Yield the ranges of constant weight decay between two offsets: start, stop, rate."""
        middle = min(max(low, self.no_decay_start), high)
        for start, stop, rate in ((low, middle, self.settings.weight_decay), (middle, high, 0.0)):
            if start < stop:
                yield start, stop, rate

    @property
    def checkpoint_range(self) -> tuple[int, int]:
        """The range of the vector that this process writes to a checkpoint.

        If there are copies of the model, each writes a part of their common shard.
        """
        first, copy = self.comm.rank * self.shard_numel, self.comm.copy_index
        low, high = (self.shard_numel * i // self.comm.num_copies for i in (copy, copy + 1))
        return first + low, first + high

    def start_gather(self) -> None:
        """Start the all-gather, if needed."""
        if self.gathered or self._work is not None:
            return
        if not self.is_resident:
            self.full.untyped_storage().resize_(self.numel * self.full.element_size())
        shard = self.shard if self.disk is None else self.disk.read()
        self._work = self.comm.all_gather(self.full, shard, self.unit)

    def start_read(self) -> None:
        """Start reading the local shard, if it is on disk."""
        if self.disk is not None and not self.gathered and self._work is None:
            self.disk.start_read()

    def _finish_gather(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self.disk is not None:
            self.comm.synchronize()
            self.disk.release()

    def gather(self) -> None:
        """All-gather the vector and expose its views as the parameters."""
        self.start_gather()
        if self._work is None:
            return
        self._finish_gather()
        self.attach_params()
        self.gathered = True

    def attach_params(self) -> None:
        """Make the module's parameters views of the vector."""
        for name, param in self.params.items():
            param.data = self.views[name]

    def detach_params(self) -> None:
        """Replace the parameters with placeholders of equal shape and dtype that take no memory."""
        for name, param in self.params.items():
            param.data = self.placeholders[name]

    def free(self) -> None:
        """Free the full vector at stage 3, but keep the local shard."""
        if not self.placement.shard_params:
            return
        self._finish_gather()  # wait for an unused prefetch
        self.detach_params()  # before freeing: reading freed memory would crash the process
        self.gathered = False
        if self.is_resident:
            return
        if not self.full.untyped_storage().resizable():  # shared with a NumPy array
            self.full = torch.empty_like(self.full)
            self.views = self.unflatten(self.full.data)
        self.full.untyped_storage().resize_(0)

    def publish(self) -> None:
        """All-gather updated shards if the weights are currently gathered."""
        self.start_publishing().wait()

    def start_publishing(self) -> Work:
        """Start `publish`; wait for the result before using the weights."""
        if not self.placement.shard_params and self.placement.shard_optimizer:
            return self.comm.all_gather(self.full, self.shard, self.unit)
        if self.placement.shard_params and self.gathered:
            # Gather into the memory that the parameters view.
            shard = self.shard if self.disk is None else self.disk.read()
            self._work = self.comm.all_gather(self.full, shard, self.unit)
            self._finish_gather()
        return CompletedWork()
