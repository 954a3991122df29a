"""Groups of processes, and their collectives on a few numbers, objects and tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from pipeline.parallel.device import local_device
from pipeline.system.position import POSITION, SAME_ORDER, DesyncError

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """A group of a job's processes, including this one; all call its methods in the same order.

    In a group of one process each method returns this process's values.
    """

    rank: int = 0
    """Rank of this process in the group."""

    ranks: tuple[int, ...] = (0,)
    """Ranks of its processes in the whole job, in the group's order."""

    process_group: dist.ProcessGroup | None = None
    """PyTorch's group; None for a single process."""

    is_tracked: bool = True
    """Whether all processes of the job enter its collectives in the same order, so that they are
    counted and compared."""

    same_collectives: bool = True
    """Whether all members run the same collectives, which every all-reduce checks; the stages of
    a pipeline don't."""

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.ranks)

    @cached_property
    def other_ranks(self) -> tuple[int, ...]:
        """Global ranks of the other processes in the group."""
        return self.ranks[: self.rank] + self.ranks[self.rank + 1 :]

    @property
    def untracked(self) -> "Group":
        """The same processes, with collectives that are not counted."""
        return replace(self, is_tracked=False)

    @property
    def global_rank(self) -> int:
        """This process's rank in the whole job."""
        return self.ranks[self.rank]

    def barrier(self) -> None:
        """Wait until every process has called it."""
        if self.process_group is not None:
            self._enter_collective("barrier")
            with POSITION.waiting(self.other_ranks):
                dist.barrier(group=self.process_group)

    def sums(self, values: Sequence[int | float]) -> list[float]:
        """Sum the values element-wise over the processes, in float64, with one collective."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def sum(self, value: int | float) -> float:
        """Return the sum of `value` over the processes."""
        return self.sums([value])[0]

    def max(self, value: int | float) -> float:
        """Return the maximum of `value` over the processes."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all processes, in rank order, on every process.

        The values are pickled, so they should be small.
        """
        if self.process_group is None:
            return [value]
        values: list[T | None] = [None] * self.size
        self._enter_collective("all_gather", "objects")
        with POSITION.waiting(self.other_ranks):
            dist.all_gather_object(values, value, group=self.process_group)
        return values  # all entries are filled  # pyrefly: ignore[bad-return]

    def all_gather(self, tensor: Tensor, *, label: str) -> list[Tensor]:
        """All-gather tensors of equal shapes, in rank order."""
        if self.size == 1:
            return [tensor]
        local = tensor.detach().contiguous()
        if local.is_meta:  # memory estimates have no values to exchange
            return [torch.empty_like(local) for _ in self.ranks]
        self._enter_collective("all_gather", label)
        parts = [torch.empty_like(local) for _ in self.ranks]
        with POSITION.waiting(self.other_ranks):
            dist.all_gather(parts, local, group=self.process_group)
        return parts

    def all_to_all(self, slices: Tensor, *, label: str) -> Tensor:
        """Send slice i along dimension 0 to rank i; return the received slices in rank order."""
        if self.size == 1 or slices.is_meta:
            return slices
        self._enter_collective("all_to_all", label)
        local = slices.detach().contiguous()
        received = torch.empty_like(local)
        with POSITION.waiting(self.other_ranks):
            dist.all_to_all_single(received, local, group=self.process_group)
        return received

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Broadcast `tensor` from rank `source`, in place."""
        if self.process_group is not None:
            self._enter_collective("broadcast", "", tensor.nbytes)
            with POSITION.waiting(self.other_ranks):
                dist.broadcast(tensor, src=self.ranks[source], group=self.process_group)

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return this process's share of the items: every `size`-th item, starting at `rank`."""
        return list(items[self.rank :: self.size])

    def append_fingerprints(self, values: Tensor) -> Tensor:
        """Append one fingerprint per process to a few float64 values that will be reduced.

        Each fingerprint is nonzero on one process only, so its sum and maximum are exact.
        """
        fingerprints = values.new_zeros(self.size)
        fingerprints[self.rank] = POSITION.fingerprint if self.same_collectives else 0
        return torch.cat([values, fingerprints])

    def check_fingerprints(self, packed: Tensor) -> Tensor:
        """Check the fingerprints and return the reduced values.

        Raises:
            DesyncError: the processes have entered different collectives.
        """
        values, fingerprints = packed.split([packed.numel() - self.size, self.size])
        if fingerprints.unique().numel() > 1:
            raise DesyncError(self._describe_desync())
        return values

    def _reduce(self, values: Sequence[int | float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.process_group is None:
            return [float(value) for value in values]
        local = torch.tensor(values, dtype=torch.float64, device=local_device())
        self._enter_collective("all_reduce", "a few values", local.nbytes)
        packed = self.append_fingerprints(local)
        with POSITION.waiting(self.other_ranks):
            dist.all_reduce(packed, op=op, group=self.process_group)
        return self.check_fingerprints(packed).tolist()

    def _enter_collective(self, kind: str, unit: str = "", num_bytes: int = 0) -> None:
        if self.is_tracked:
            # Pipelines read different rows, so message sizes between stages differ.
            POSITION.enter_collective(kind, unit, num_bytes if self.same_collectives else 0)

    def _describe_desync(self) -> str:
        """Describe the first collective at which processes differ; all of them must call this."""
        recent = list(POSITION.recent)
        histories = self.gather_objects({entry.number: str(entry) for entry in recent})
        local = histories[self.rank]
        for number in sorted(local):
            for other, remote in zip(self.ranks, histories, strict=True):
                if number in remote and remote[number] != local[number]:
                    return (
                        f"rank {self.global_rank} was at {local[number]} while rank {other} was at"
                        f" {remote[number]}; {SAME_ORDER}"
                    )
        return f"the processes ran different layers; {SAME_ORDER}"


@dataclass(frozen=True)
class DataGroup(Group):
    """Processes that train several copies of one model, each copy sharded over part of them.

    This process has rank `copies.rank * shards.size + shards.rank` in the group.
    """

    shards: Group = field(kw_only=True)
    """The processes that shard this process's copy of the model."""

    copies: Group = field(kw_only=True)
    """The processes that have the same shard as this one, one in each copy."""


TransferKind = Literal["hidden states", "gradients", "tied gradients", "tied weights"]
"""Kinds of transfers between the stages of a pipeline.

NCCL has no tags: sends and receives in one communicator take place in call order, and a tensor
larger than NCCL's buffers is only sent once the other side has called receive. If one stage sent
hidden states to the next while that stage sent gradients back, both would wait forever. So each
kind has a separate communicator, in which sends and receives are in the same order.
"""

TRANSFER_KINDS: tuple[TransferKind, ...] = get_args(TransferKind)


@dataclass(frozen=True)
class StageGroup(Group):
    """The stages of a pipeline, with process groups for their transfers."""

    channels: Mapping[TransferKind, Group] = field(kw_only=True)
    """Groups of the same processes by kind of transfer; empty if tags separate transfers."""


SELF_GROUP = Group()


def tree_sum(parts: Sequence[Float[Tensor, "*S"]]) -> Float[Tensor, "*S"]:
    """Sum the tensors in a binary tree, in order, in at least fp32, and round once."""
    dtype = parts[0].dtype
    level = [part.float() for part in parts] if dtype.itemsize < 4 else list(parts)
    while len(level) > 1:
        level = [reduce(torch.add, level[first : first + 2]) for first in range(0, len(level), 2)]
    return level[0].to(dtype)


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# The fallbacks are the names before torch 2.13.


def all_gather(full: Tensor, shard: Tensor, process_group: dist.ProcessGroup | None) -> dist.Work:
    """Start filling the flat tensor `full` with the shards of all processes, in rank order."""
    work = _all_gather(full, shard, group=process_group, async_op=True)
    assert work is not None  # because of async_op
    return work


def reduce_scatter(
    shard: Tensor, full: Tensor, process_group: dist.ProcessGroup | None
) -> dist.Work:
    """Start filling the flat tensor `shard` with its part of the sum over all processes."""
    work = _reduce_scatter(shard, full, group=process_group, async_op=True)
    assert work is not None
    return work
