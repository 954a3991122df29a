"""Which processes share what: the only place that maps ranks.

A function asks `current_mesh()`; an object that outlives a call is given its group. What concerns
the job - who writes files, who is alive, where all must have come - asks `mesh.world`. What
concerns a model - its shards, its batch, sums over the batch - asks `mesh.data`. `cut_mesh` says
once for the job how its processes are divided.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain

import torch.distributed as dist

from pipeline.errors import require
from pipeline.parallel.channels import CHANNELS, Channel
from pipeline.parallel.group import ALONE, DataGroup, Group, StageGroup
from pipeline.parallel.neighbours import neighbours

SECOND_WORD_SECONDS = 30

PROCESSES_A_SECOND = 64
"""Whose connections are made in a second, on the safe side."""


@dataclass(frozen=True)
class Mesh:
    """The processes of a job, by what they share."""

    world: Group
    """All of them."""

    data: Group
    """Those that train the same model, each on its share of a batch; they shard its states, all
    together or, as a `DataGroup`, copy by copy."""

    stages: Group = ALONE
    """Those that have the stages of one pipeline, in order: each some of the model's blocks, and
    all the same share of a batch."""

    tensor: Group = ALONE
    """Those that compute each layer together, on the same share of a batch."""

    parts: Group = ALONE
    """Those that have the parts of one copy of a model: the stages of a pipeline, each of `tensor`
    processes, in order."""

    @property
    def is_main(self) -> bool:
        """True on the process that writes files and prints."""
        return self.world.rank == 0

    @property
    def in_step(self) -> range:
        """Ranks of those that come to the same collectives as this process: all, or its stage's."""
        size = self.world.size // self.stages.size
        return range(self.stages.rank * size, (self.stages.rank + 1) * size)

    @property
    def local_size(self) -> int:
        """Number of processes on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world.size))

    @property
    def shape(self) -> dict[str, int]:
        """Processes along each axis, as a run records it."""
        copies = self.data.copies.size if isinstance(self.data, DataGroup) else 1
        return {
            "processes": self.world.size,
            "stages": self.stages.size,
            "tensor": self.tensor.size,
            "replicas": copies,
            "shards": self.data.size // copies,
        }

    def tp_group(self, size: int, *, timeout_seconds: float) -> Group:
        """This process's group of `size` neighbours in rank that generate together.

        All processes call it. Such groups go their own ways: their collectives are not among the
        job's.

        Raises:
            ConfigError: the processes can't be cut into groups of that size.
        """
        number = self.world.size
        require(
            number % size == 0,
            f"inference_tp_size {size} doesn't divide the {number} processes; choose one that does,"
            " or start another number of processes",
        )
        if size == 1:
            return ALONE
        rows = [range(first, first + size) for first in range(0, number, size)]
        return neighbours(subgroup(rows, timeout_seconds=timeout_seconds, counted=False))


def current_mesh() -> Mesh:
    """The mesh of the job that this process has joined, or of this process alone."""
    if _cut:
        return _cut[-1]
    if not dist.is_initialized():
        return Mesh(world=ALONE, data=ALONE)
    ranks = tuple(range(dist.get_world_size()))
    world = Group(dist.get_rank(), ranks, dist.group.WORLD)
    return Mesh(world=world, data=world)


_cut: list[Mesh] = []
"""The mesh that `cut_mesh` has made: of the job, as torch's process group is."""


@contextmanager
def cut_mesh(*, replicas: int, pp: int = 1, tp: int = 1, timeout_seconds: float) -> Iterator[Mesh]:
    """Divide the processes of the job, for as long as it lasts; all of them call it.

    Args:
        replicas: copies of each model; those of one copy are adjacent in rank, as are the
            processes of a machine.
        pp: stages of a pipeline. The first 1/pp of the processes have the first stage.
        tp: processes that compute each layer together, neighbours in rank.
        timeout_seconds: for which one process may keep the others waiting.

    Raises:
        ConfigError: the processes can't be divided so.
    """
    mesh = current_mesh()
    number = mesh.world.size
    require(
        number % (pp * tp * replicas) == 0,
        f"{pp} stages of {replicas} replicas, each layer on {tp} processes, don't divide the"
        f" {number} processes",
    )
    stages = _rows(range(number), number // pp)
    data = [stage[first::tp] for stage in stages for first in range(tp)]
    if pp * tp > 1:
        mesh = _in_parts(mesh, stages, data, tp=tp, timeout_seconds=timeout_seconds)
    if replicas > 1:
        mesh = replace(mesh, data=_in_copies(mesh.data, data, replicas, timeout_seconds))
    _cut.append(mesh)
    try:
        yield mesh
    finally:
        _cut.pop()


def _in_parts(
    mesh: Mesh,
    stages: Sequence[Sequence[int]],
    data: Sequence[Sequence[int]],
    *,
    tp: int,
    timeout_seconds: float,
) -> Mesh:
    """The mesh of models that are cut into stages, or into parts of each layer, or both."""
    in_step = len(stages) == 1

    def cut(rows: Iterable[Sequence[int]]) -> Group:
        return subgroup(rows, timeout_seconds=timeout_seconds)

    rows = [_rows(stage, tp) for stage in stages]
    world, own = replace(mesh.world, in_step=in_step), cut(data)
    tensor = neighbours(cut(chain(*rows))) if tp > 1 else ALONE
    if in_step:
        return Mesh(world=world, data=own, tensor=tensor, parts=tensor)
    of_stages = pipeline_of(
        list(zip(*stages, strict=True)),
        timeout_seconds=timeout_seconds,
        apart=dist.get_backend() == "nccl",
    )
    if tp == 1:
        return Mesh(world=world, data=own, stages=of_stages, parts=of_stages)
    # The first stage's processes, then the next one's: of each copy of the model.
    parts = [list(chain(*row)) for row in zip(*rows, strict=True)]
    all_parts = replace(cut(parts), in_step=False)
    return Mesh(world=world, data=own, stages=of_stages, tensor=tensor, parts=all_parts)


def pipeline_of(
    rows: Sequence[Sequence[int]], *, timeout_seconds: float, apart: bool
) -> StageGroup:
    """The stages of this process's pipeline, of a job that is cut into such rows; all call it.

    Args:
        rows: ranks of each pipeline, stage by stage.
        timeout_seconds: for which one process may keep the others waiting.
        apart: whether each kind of transfer has a process group of its own
            (`pipeline.parallel.channels`).
    """
    group = subgroup(rows, timeout_seconds=timeout_seconds)
    channels: dict[Channel, dist.ProcessGroup] = {}
    for each in CHANNELS if apart else ():
        own = subgroup(rows, timeout_seconds=timeout_seconds).process_group
        assert own is not None
        channels[each] = own
    return StageGroup(
        group.rank, group.ranks, group.process_group, in_step=False, channels=channels
    )


def _in_copies(
    data: Group, rows: Sequence[Sequence[int]], replicas: int, timeout_seconds: float
) -> DataGroup:
    """The data axis, whose processes have that many copies of the model."""
    copies = [_rows(row, len(row) // replicas) for row in rows]
    across = [ranks for each in copies for ranks in zip(*each, strict=True)]
    return DataGroup(
        data.rank,
        data.ranks,
        data.process_group,
        shards=subgroup(chain(*copies), timeout_seconds=timeout_seconds),
        copies=subgroup(across, timeout_seconds=timeout_seconds),
    )


def _rows(ranks: Sequence[int], size: int) -> list[Sequence[int]]:
    """Neighbours in rank, that many together."""
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def subgroup(
    rows: Iterable[Sequence[int]], *, timeout_seconds: float, counted: bool = True
) -> Group:
    """This process's group, of a job that is cut into groups of these ranks; all call it.

    Each process is in one row, and makes that group alone: what it takes doesn't grow with their
    number. With NCCL the world's communicator is split once, for all rows.
    """
    own = next(tuple(ranks) for ranks in rows if dist.get_rank() in ranks)
    group = dist.new_group(
        list(own),
        timeout=patience(timeout_seconds, len(own)),
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup)  # as where this process is a member
    return Group(own.index(dist.get_rank()), own, group, counted)


def patience(timeout_seconds: float, processes: int) -> timedelta:
    """How long torch waits in a collective of that many processes.

    The watchdog has the first word, which names the process; this is for what it can't see. The
    more processes there are, the longer it takes until all have met, and until it has spoken.
    """
    return timedelta(seconds=timeout_seconds + SECOND_WORD_SECONDS + processes / PROCESSES_A_SECOND)
