"""Collectives of a model that is kept in several copies, each sharded among processes of its own.

Hybrid sharding (Zhao et al. 2023, "PyTorch FSDP", section 3.2.2): weights travel within a copy
alone, and the piece of a gradient that has been summed there is summed over the copies. Both sums
are trees in rank order, and one after the other is the tree over all processes where a copy has a
power of two of them: the bits are those of one copy.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.engine.buffers import BufferPool
from pipeline.engine.comm import Collectives, Work


class CollectivesOverCopies(Collectives):
    """What a copy does by itself, and sums over all copies; made by all processes together."""

    def __init__(self, device: torch.device, within: Collectives, over: Collectives) -> None:
        super().__init__(device, within.log.owner, within.group, pin_memory=within.pin_memory)
        self.log = within.log
        self.copy, self.copies = over.rank, over.size
        self.asynchronous = within.asynchronous
        self.adds_in_fp32 = within.adds_in_fp32
        self.defers = within.defers
        self.starts_zero = within.starts_zero
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
        buffer = self._pool.borrow(padded, own.dtype, at_most=2)
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

    @property
    def rendezvous(self) -> int:
        """A number for the present moment, of this copy."""
        return self._within.rendezvous

    def has_been_read(self, rendezvous: int) -> bool:
        """Whether the others of this copy are done with what was there before that moment."""
        return self._within.has_been_read(rendezvous)

    def synchronize(self) -> None:
        """Wait until no copy from main memory to the GPU is under way."""
        self._within.synchronize()

    def release(self, buffer: Tensor) -> bool:
        """Give a buffer's memory back until it is written again."""
        return self._within.release(buffer)

    def meet(self) -> None:
        """Come to a moment after which all before it has been read."""
        self._within.meet()

    def end_step(self) -> None:
        """Give back the memory in which pieces were summed."""
        self._pool.release()

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers in which pieces are summed."""
        return self._pool.num_bytes


@dataclass
class _SumOverCopies:
    """A reduction within the copy, after which the copies are summed."""

    comm: CollectivesOverCopies
    work: Work
    out: Tensor
    unit: str
    done: bool = field(default=False, init=False)

    def wait(self) -> None:
        """Have the sum in `out`."""
        if not self.done:
            self.work.wait()
            self.comm.add_copies(self.out, self.unit)
            self.done = True
