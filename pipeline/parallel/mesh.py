"""The mesh of processes: the only module that maps ranks.

Functions call `current_mesh()`; objects that outlive a call are passed their group. `mesh.world`,
the processes that train (or those that only generate), is used for files, logs and barriers;
`mesh.data` for the shards of a model and for sums over its batch. `split_mesh` divides the
processes once per job.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline.parallel.group import SELF_GROUP, TRANSFER_KINDS, DataGroup, Group, StageGroup
from pipeline.system.errors import require

TIMEOUT_MARGIN_SECONDS = 30
"""Seconds by which PyTorch's timeout exceeds the watchdog's, which can name a process."""

WAIT_SECONDS = 7 * 86_400.0
"""Timeout of collectives between processes that train and processes that only generate."""

CONNECTIONS_PER_SECOND = 64
"""Conservative estimate of the number of processes that connect per second."""


@dataclass(frozen=True)
class RolloutGroups:
    """Groups of training processes and processes that only generate."""

    job: Group
    """All processes of the job; the last ones generate."""

    weights: Group
    """The first training process and those that generate; other processes have a group of one."""

    generates: bool
    """Whether this process only generates."""


@dataclass(frozen=True)
class Mesh:
    """The processes of a job along each axis."""

    world: Group
    """All processes of the job; if some only generate, those of the same kind as this one."""

    data: Group
    """Processes that train the same model, each on its share of a batch; they shard its states, all
    together or, as a `DataGroup`, copy by copy."""

    stages: Group = SELF_GROUP
    """Processes of one pipeline, in the order of its stages: each has some of the model's blocks,
    and all have the same share of a batch."""

    tensor: Group = SELF_GROUP
    """The tensor-parallel group, with the same share of a batch."""

    model_parallel: Group = SELF_GROUP
    """Processes that together have a copy of a model: the pipeline stages, each with the processes
    of `tensor`, in order."""

    rollout: RolloutGroups | None = None
    """Groups for rollouts on separate processes; None if all processes train."""

    @property
    def is_main(self) -> bool:
        """True on the process that writes files and prints."""
        return self.world.global_rank == 0

    @property
    def same_collectives(self) -> bool:
        """Whether all processes of the job run the same collectives."""
        return self.stages.size == 1 and self.rollout is None

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
        """Create this process's group of `size` processes of adjacent rank that generate together.

        All processes must call this. The group's collectives are not compared with other groups'.

        Raises:
            ConfigError: the number of processes is not divisible by `size`.
        """
        world_size = self.world.size
        require(
            world_size % size == 0,
            f"the number of processes, {world_size}, is not divisible by inference_tp_size {size};"
            " choose a divisor, or start a different number of processes",
        )
        if size == 1:
            return SELF_GROUP
        rows = [range(first, first + size) for first in range(0, world_size, size)]
        return new_subgroup(rows, timeout_seconds=timeout_seconds, is_tracked=False)


def current_mesh() -> Mesh:
    """Return the mesh of the job that this process has joined, or of a single process."""
    if _meshes:
        return _meshes[-1]
    if not dist.is_initialized():
        return Mesh(world=SELF_GROUP, data=SELF_GROUP)
    ranks = tuple(range(dist.get_world_size()))
    world = Group(dist.get_rank(), ranks, dist.group.WORLD)
    return Mesh(world=world, data=world)


_meshes: list[Mesh] = []
"""The mesh of `split_mesh`, which is global like torch's process group."""


@contextmanager
def split_mesh(
    *, replicas: int, pp: int = 1, tp: int = 1, generating: int = 0, timeout_seconds: float
) -> Iterator[Mesh]:
    """Context manager that divides the job's processes into groups; all of them must enter it.

    The last `generating` processes only generate; the axes contain the others. The first 1/pp of
    the processes have the first of `pp` stages. Within a stage, processes of the same replica are
    adjacent in rank, as are processes of a tensor-parallel group of size `tp`. A process may keep
    the others waiting for `timeout_seconds`.

    Raises:
        ConfigError: the number of processes is not a multiple of replicas * pp * tp.
    """
    mesh = current_mesh()
    if generating > 0:
        mesh = _set_apart(mesh.world, generating, timeout_seconds)
    if mesh.rollout is not None and mesh.rollout.generates:
        replicas = pp = tp = 1
    world_size = mesh.world.size
    require(
        world_size % (pp * tp * replicas) == 0,
        f"the number of processes, {world_size}, is not divisible by pp {pp} x replicas {replicas}"
        f" x tp {tp}; start a multiple of {pp * replicas * tp} processes",
    )
    ranks = torch.arange(world_size).view(pp, replicas, -1, tp)

    def axis(*dims: int) -> Group:
        """Return this process's group along some dimensions of `ranks`."""
        other_dims = [dim for dim in range(ranks.ndim) if dim not in dims]
        rows = ranks.permute(*other_dims, *dims).flatten(len(other_dims)).flatten(0, -2)
        return new_subgroup(rows.tolist(), timeout_seconds=timeout_seconds)

    if pp * tp > 1:
        mesh = replace(mesh, world=replace(mesh.world, same_collectives=pp == 1), data=axis(1, 2))
    if tp > 1:
        tensor = axis(3)
        mesh = replace(mesh, tensor=tensor, model_parallel=tensor)
    if pp > 1:
        rows = ranks.flatten(1).T.tolist()
        has_tags = dist.get_backend() != "nccl"
        stages = new_pipeline_group(rows, timeout_seconds=timeout_seconds, has_tags=has_tags)
        model_parallel = stages if tp == 1 else replace(axis(0, 3), same_collectives=False)
        mesh = replace(mesh, stages=stages, model_parallel=model_parallel)
    if replicas > 1:
        data = (mesh.data.rank, mesh.data.ranks, mesh.data.process_group)
        mesh = replace(mesh, data=DataGroup(*data, shards=axis(2), copies=axis(1)))
    _meshes.append(mesh)
    try:
        yield mesh
    finally:
        _meshes.pop()


def _set_apart(job: Group, generating: int, timeout_seconds: float) -> Mesh:
    """Return the mesh of this process if the last `generating` processes only generate.

    Training and generating processes wait for each other indefinitely; the watchdog detects hangs.
    """
    training = job.size - generating
    generators = range(training, job.size)
    # Each process creates three groups: PyTorch's names of groups contain their number.
    world = new_subgroup([range(training), generators], timeout_seconds=timeout_seconds)
    everyone = new_subgroup([range(job.size)], timeout_seconds=WAIT_SECONDS)
    rows = [[0, *generators], *([rank] for rank in range(1, training))]
    weights = new_subgroup(rows, timeout_seconds=WAIT_SECONDS, is_tracked=False)
    return Mesh(world, world, rollout=RolloutGroups(everyone, weights, job.rank in generators))


def new_pipeline_group(
    rows: Sequence[Sequence[int]], *, timeout_seconds: float, has_tags: bool
) -> StageGroup:
    """Create the group of this process's pipeline stages; all processes must call this.

    `rows` lists the ranks of each pipeline in the order of its stages. If the backend doesn't
    support tags (`has_tags` is false), each `TransferKind` gets a separate group.
    """
    group = new_subgroup(rows, timeout_seconds=timeout_seconds)
    kinds = () if has_tags else TRANSFER_KINDS
    return StageGroup(
        group.rank,
        group.ranks,
        group.process_group,
        same_collectives=False,
        channels={kind: new_subgroup(rows, timeout_seconds=timeout_seconds) for kind in kinds},
    )


def new_subgroup(
    rows: Iterable[Sequence[int]], *, timeout_seconds: float, is_tracked: bool = True
) -> Group:
    """Create this process's group, one of the `rows` of ranks; all processes must call this.

    Each process is in one row and creates only that group.
    """
    ranks = next(tuple(row) for row in rows if dist.get_rank() in row)
    timeout = collective_timeout(timeout_seconds, len(ranks))
    group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this process is a member
    return Group(ranks.index(dist.get_rank()), ranks, group, is_tracked)


def collective_timeout(timeout_seconds: float, processes: int) -> timedelta:
    """Return PyTorch's timeout for collectives of this number of processes.

    It is longer than the watchdog's, and grows with the time that processes need to connect.
    """
    connecting_seconds = processes / CONNECTIONS_PER_SECOND
    return timedelta(seconds=timeout_seconds + TIMEOUT_MARGIN_SECONDS + connecting_seconds)
