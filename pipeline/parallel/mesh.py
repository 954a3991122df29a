"""The mesh of processes: the only module that maps ranks.

Functions call `current_mesh()`; objects that outlive a call are passed their group. `mesh.world` is
for the whole job: files, logs, liveness, barriers. `mesh.data` is for a model: its shards, its
batch, sums over the batch. `cut_mesh` divides the processes, once per job.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline.parallel.group import ALONE, WHATS, DataGroup, Group, StageGroup
from pipeline.system.errors import require

SECOND_WORD_SECONDS = 30
"""Seconds by which torch's timeout exceeds the watchdog's, which can name a process."""

PROCESSES_A_SECOND = 64
"""Processes whose connections are established per second, conservatively."""


@dataclass(frozen=True)
class Mesh:
    """The processes of a job along each axis."""

    world: Group
    """All processes of the job."""

    data: Group
    """Processes that train the same model, each on its share of a batch; they shard its states, all
    together or, as a `DataGroup`, copy by copy."""

    stages: Group = ALONE
    """Processes of one pipeline, in the order of its stages: each has some of the model's blocks,
    and all have the same share of a batch."""

    tensor: Group = ALONE
    """The tensor-parallel group, with the same share of a batch."""

    parts: Group = ALONE
    """Processes with the parts of one copy of a model: the pipeline stages, each with the processes
    of `tensor`, in order."""

    @property
    def is_main(self) -> bool:
        """True on the process that writes files and prints."""
        return self.world.rank == 0

    @property
    def shape(self) -> dict[str, int]:
        """Number of processes along each axis, as recorded by a run."""
        copies = self.data.copies.size if isinstance(self.data, DataGroup) else 1
        return {
            "processes": self.world.size,
            "stages": self.stages.size,
            "tensor": self.tensor.size,
            "replicas": copies,
            "shards": self.data.size // copies,
        }

    def tp_group(self, size: int, *, timeout_seconds: float) -> Group:
        """This process's group of `size` processes, adjacent in rank, that generate together.

        A collective. The collectives of such groups are not compared with those of other groups.

        Raises:
            ConfigError: the processes can't be divided into groups of that size.
        """
        number = self.world.size
        require(
            number % size == 0,
            f"inference_tp_size {size} doesn't divide the {number} processes; choose one that"
            " does, or start a different number of processes",
        )
        if size == 1:
            return ALONE
        rows = [range(first, first + size) for first in range(0, number, size)]
        return subgroup(rows, timeout_seconds=timeout_seconds, counted=False)


def current_mesh() -> Mesh:
    """The mesh of the job that this process has joined, or of a single process."""
    if _cut:
        return _cut[-1]
    if not dist.is_initialized():
        return Mesh(world=ALONE, data=ALONE)
    ranks = tuple(range(dist.get_world_size()))
    world = Group(dist.get_rank(), ranks, dist.group.WORLD)
    return Mesh(world=world, data=world)


_cut: list[Mesh] = []
"""The mesh of `cut_mesh`, which is global like torch's process group."""


@contextmanager
def cut_mesh(*, replicas: int, pp: int = 1, tp: int = 1, timeout_seconds: float) -> Iterator[Mesh]:
    """Context in which the processes of the job are divided. A collective.

    Args:
        replicas: copies of each model; the processes of one copy are adjacent in rank, as are the
            processes of a machine.
        pp: pipeline stages; the first 1/pp of the processes have the first stage.
        tp: tensor-parallel size; the processes of a group are adjacent in rank.
        timeout_seconds: time that a process may keep the others waiting.

    Raises:
        ConfigError: the number of processes is not a multiple of replicas * pp * tp.
    """
    mesh = current_mesh()
    number = mesh.world.size
    require(
        number % (pp * tp * replicas) == 0,
        f"{pp} pipeline stages, {replicas} replicas and {tp} tensor-parallel processes don't divide"
        f" the {number} processes; start a multiple of their product",
    )
    ranks = torch.arange(number).view(pp, replicas, -1, tp)

    def axis(*dims: int) -> Group:
        """This process's group along some dimensions of `ranks`."""
        others = [dim for dim in range(ranks.ndim) if dim not in dims]
        rows = ranks.permute(*others, *dims).flatten(len(others)).flatten(0, -2)
        return subgroup(rows.tolist(), timeout_seconds=timeout_seconds)

    if pp * tp > 1:
        mesh = replace(mesh, world=replace(mesh.world, in_step=pp == 1), data=axis(1, 2))
    if tp > 1:
        tensor = axis(3)
        mesh = replace(mesh, tensor=tensor, parts=tensor)
    if pp > 1:
        rows = ranks.flatten(1).T.tolist()
        apart = dist.get_backend() == "nccl"
        stages = get_pipeline(rows, timeout_seconds=timeout_seconds, apart=apart)
        parts = stages if tp == 1 else replace(axis(0, 3), in_step=False)
        mesh = replace(mesh, stages=stages, parts=parts)
    if replicas > 1:
        own = (mesh.data.rank, mesh.data.ranks, mesh.data.process_group)
        mesh = replace(mesh, data=DataGroup(*own, shards=axis(2), copies=axis(1)))
    _cut.append(mesh)
    try:
        yield mesh
    finally:
        _cut.pop()


def get_pipeline(
    rows: Sequence[Sequence[int]], *, timeout_seconds: float, apart: bool
) -> StageGroup:
    """The stages of this process's pipeline. A collective.

    Args:
        rows: ranks of each pipeline, in the order of stages.
        timeout_seconds: time that a process may keep the others waiting.
        apart: whether each kind of transfer has a separate process group
            (`pipeline.parallel.group.What`).
    """
    group = subgroup(rows, timeout_seconds=timeout_seconds)
    kinds = WHATS if apart else ()
    return StageGroup(
        group.rank,
        group.ranks,
        group.process_group,
        in_step=False,
        channels={what: subgroup(rows, timeout_seconds=timeout_seconds) for what in kinds},
    )


def subgroup(
    rows: Iterable[Sequence[int]], *, timeout_seconds: float, counted: bool = True
) -> Group:
    """This process's group, for a job divided into these rows of ranks. A collective.

    Each process is in one row, and creates only that group.
    """
    own = next(tuple(ranks) for ranks in rows if dist.get_rank() in ranks)
    group = dist.new_group(
        list(own), timeout=patience(timeout_seconds, len(own)), use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup)  # this process is a member
    return Group(own.index(dist.get_rank()), own, group, counted)


def patience(timeout_seconds: float, processes: int) -> timedelta:
    """Torch's timeout for collectives of this number of processes.

    It is longer than the watchdog's, and grows with the time that processes need to connect.
    """
    return timedelta(seconds=timeout_seconds + SECOND_WORD_SECONDS + processes / PROCESSES_A_SECOND)
