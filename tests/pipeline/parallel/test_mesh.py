"""Axes of the mesh, and independence of its groups."""

from typing import Any

from pipeline.parallel.group import SELF_GROUP, DataGroup
from pipeline.parallel.mesh import current_mesh, new_subgroup, split_mesh
from pipeline.system.position import POSITION
from tests.distributed import run_ranks


def describe_axes() -> dict[str, Any]:
    """Return the axes of a process and their sums."""
    mesh = current_mesh()
    before = POSITION.number
    pair = mesh.tp_group(2, timeout_seconds=60.0)
    names = pair.gather_objects(mesh.world.rank)
    single = mesh.tp_group(1, timeout_seconds=60.0)
    uncounted = POSITION.number == before
    every_other = new_subgroup([(0, 2), (1, 3)], timeout_seconds=60.0)
    return {
        "world": mesh.world.ranks,
        "data": mesh.data.ranks,
        "is_main": mesh.is_main,
        "pair": (pair.rank, pair.ranks, names),
        "alone": single == SELF_GROUP,
        "uncounted": uncounted,
        "every_other": (every_other.rank, every_other.ranks, every_other.sum(mesh.world.rank)),
        "share": every_other.shard("abcde"),
    }


def test_axes_have_the_expected_ranks() -> None:
    for rank, axes in enumerate(run_ranks(describe_axes, world_size=4)):
        assert axes["world"] == axes["data"] == (0, 1, 2, 3)
        assert axes["is_main"] == (rank == 0)
        first = rank - rank % 2
        assert axes["pair"] == (rank % 2, (first, first + 1), [first, first + 1])
        assert axes["alone"]
        assert axes["uncounted"]
        assert axes["every_other"] == (rank // 2, (rank % 2, rank % 2 + 2), 2 * (rank % 2) + 2)
        assert axes["share"] == (["a", "c", "e"], ["b", "d"])[rank // 2]


def diverge() -> str:
    """Return the error of the second group when two processes diverge."""
    group = new_subgroup([(0, 2), (1, 3)], timeout_seconds=60.0)
    POSITION.enter_collective("all_gather", "weights", 8 * (1 + (current_mesh().world.rank == 3)))
    try:
        group.sum(1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_desync_error_has_the_global_ranks() -> None:
    first, second, third, fourth = run_ranks(diverge, world_size=4)

    assert first == third == ""
    assert "rank 1 was at all_gather of weights, 8 bytes while rank 3 was at" in second
    assert "rank 3 was at all_gather of weights, 16 bytes while rank 1 was at" in fourth


def describe_copies() -> tuple[Any, ...]:
    before = current_mesh()
    with split_mesh(replicas=2, timeout_seconds=60.0) as mesh:
        assert current_mesh() is mesh
        data = mesh.data
        assert isinstance(data, DataGroup)
        sums = data.sum(1), data.shards.sum(mesh.world.rank), data.copies.sum(mesh.world.rank)
    assert current_mesh().data == before.data
    return data.shards.ranks, data.copies.ranks, sums, mesh.shape


def test_copies_are_sharded_over_adjacent_ranks() -> None:
    shape = {"processes": 4, "stages": 1, "tensor": 1, "replicas": 2, "shards": 2}
    assert run_ranks(describe_copies, world_size=4) == [
        ((0, 1), (0, 2), (4, 1, 2), shape),
        ((0, 1), (1, 3), (4, 1, 4), shape),
        ((2, 3), (0, 2), (4, 5, 2), shape),
        ((2, 3), (1, 3), (4, 5, 4), shape),
    ]
