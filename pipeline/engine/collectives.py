"""Choice of the collectives of an engine, and those of a model in several sharded copies."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.config.model import ZeroConfig
from pipeline.engine.buffers import BufferPool
from pipeline.engine.comm import Collectives, GroupCollectives, Work
from pipeline.engine.shared_memory import SharedMemoryCollectives, on_one_machine
from pipeline.parallel.group import DataGroup, Group
from pipeline.system.position import SAME_ORDER, DesyncError


class CollectivesOverCopies(Collectives):
    """Collectives within one copy, and sums over all copies; built by all processes together."""

    def __init__(self, device: torch.device, within: Collectives, over: Collectives) -> None:
        super().__init__(device, within.log.owner, within.group, pin_memory=within.pin_memory)
        self.log = within.log
        self.copy, self.copies = over.rank, over.size
        self.asynchronous = within.asynchronous
        self._within, self._over = within, over
        self._pool = BufferPool(over, device)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a vector that the collectives of this copy read or write."""
        return self._within.empty(numel, dtype, device)

    def all_gather(self, full: Tensor, shard: Tensor, unit: str) -> Work:
        """Fill `full` with the shards of this copy's processes."""
        return self._within.all_gather(full, shard, unit)

    def reduce_scatter(self, full: Tensor, out: Tensor, unit: str) -> Work:
        """Write the sum over all processes of the own piece of `full` to `out`, in fp32."""
        return _SumOverCopies(self, self._within.reduce_scatter(full, out, unit), out, unit)

    def add_copies(self, own: Tensor, unit: str) -> None:
        """Sum a piece over the copies, in place: each adds up a part, and all gather them."""
        padded = -(-own.numel() // self.copies) * self.copies
        buffer = self._pool.borrow(padded, own.dtype)
        buffer[: own.numel()].copy_(own)
        buffer[own.numel() :].zero_()
        part = self._over.piece(buffer)
        self._over.reduce_scatter(buffer, part, unit).wait()
        self._over.all_gather(buffer, part, unit).wait()
        own.copy_(buffer[: own.numel()])
        self._pool.give_back(buffer)

    def all_reduce(self, values: Tensor) -> None:
        """Sum a few float64 values over all processes, in place."""
        self._within.all_reduce(values)
        self._over.all_reduce(values)

    def synchronize(self) -> None:
        """Wait until no copy from main memory to the GPU is under way."""
        self._within.synchronize()

    def end_step(self) -> None:
        """Give back the memory in which pieces were summed."""
        self._pool.release()


@dataclass
class _SumOverCopies:
    """A reduction within the copy, after which the copies are summed."""

    comm: CollectivesOverCopies
    work: Work
    out: Tensor
    unit: str
    done: bool = field(default=False, init=False)

    def wait(self) -> None:
        """Complete the sum in `out`."""
        if not self.done:
            self.work.wait()
            self.comm.add_copies(self.out, self.unit)
            self.done = True


_TAKEN = Counter[str]()
"""Number of engines of this process by name."""


def make_collectives(
    device: torch.device, zero: ZeroConfig, group: Group, *, name: str
) -> Collectives:
    """The fastest collectives between the processes of a group; all of them call it in step.

    The second engine of a name gets a number behind it, so that each has a name of its own.

    Raises:
        DesyncError: the processes build different engines.
    """
    if isinstance(group, DataGroup):
        within = make_collectives(device, zero, group.shards, name=name)
        over = make_collectives(device, zero, group.copies, name=f"{name}, over its copies")
        return CollectivesOverCopies(device, within, over)
    name = _unique(name, group)
    pin_memory = zero.offload.pin_memory
    if group.size == 1:
        return Collectives(device, name, group, pin_memory=pin_memory)
    if device.type == "cpu" and zero.shared_memory and on_one_machine(group):
        return SharedMemoryCollectives(name, group)
    deterministic = zero.reduction == "deterministic"
    return GroupCollectives(
        device,
        name,
        group,
        deterministic=deterministic,
        pin_memory=pin_memory,
        narrow=torch.bfloat16 if zero.reduce_dtype == "bf16" else None,
    )


def _unique(name: str, group: Group) -> str:
    given = group.gather_objects((name, _TAKEN[name] + 1))
    for other, (theirs, _) in zip(group.ranks, given, strict=True):
        if theirs != given[0][0]:
            raise DesyncError(
                f"rank {group.ranks[0]} builds the engine {given[0][0]!r} while rank {other} builds"
                f" {theirs!r}; {SAME_ORDER}"
            )
    _TAKEN[name] = number = max(count for _, count in given)
    return name if number == 1 else f"{name} {number}"
