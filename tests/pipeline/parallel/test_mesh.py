"""The mesh says which processes share what, and its groups keep to themselves."""

from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from pipeline.errors import ConfigError
from pipeline.parallel.group import ALONE, DataGroup
from pipeline.parallel.mesh import Mesh, current_mesh, cut_mesh, subgroup
from pipeline.position import HERE
from tests.distributed import run_ranks


def test_a_process_alone_has_a_mesh_of_itself() -> None:
    mesh = current_mesh()

    assert mesh == Mesh(world=ALONE, data=ALONE)
    assert mesh.is_main
    assert (mesh.world.rank, mesh.world.size, mesh.world.ranks) == (0, 1, (0,))


def test_processes_of_this_machine_are_those_that_torchrun_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert current_mesh().local_size == 1

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert current_mesh().local_size == 4


def place() -> dict[str, Any]:
    """What the axes of a process are, and what they add up to."""
    mesh = current_mesh()
    before = HERE.number
    pair = mesh.tp_group(2, timeout_seconds=60.0)
    names = pair.gather_objects(mesh.world.rank)
    alone = mesh.tp_group(1, timeout_seconds=60.0)
    uncounted = HERE.number == before
    every_other = subgroup([(0, 2), (1, 3)], timeout_seconds=60.0)
    return {
        "world": mesh.world.ranks,
        "data": mesh.data.ranks,
        "is_main": mesh.is_main,
        "pair": (pair.rank, pair.ranks, names),
        "alone": alone == ALONE,
        "uncounted": uncounted,
        "every_other": (every_other.rank, every_other.ranks, every_other.sum(mesh.world.rank)),
        "share": every_other.share("abcde"),
    }


def test_axes_know_their_places_in_the_job() -> None:
    for rank, said in enumerate(run_ranks(place, world_size=4)):
        assert said["world"] == said["data"] == (0, 1, 2, 3)
        assert said["is_main"] == (rank == 0)
        first = rank - rank % 2
        assert said["pair"] == (rank % 2, (first, first + 1), [first, first + 1])
        assert said["alone"]
        assert said["uncounted"]
        assert said["every_other"] == (rank // 2, (rank % 2, rank % 2 + 2), 2 * (rank % 2) + 2)
        assert said["share"] == (["a", "c", "e"], ["b", "d"])[rank // 2]


def go_apart() -> str:
    """What the second group hears of two processes that did not do the same."""
    group = subgroup([(0, 2), (1, 3)], timeout_seconds=60.0)
    HERE.enter_collective("all_gather", "weights", 8 * (1 + (current_mesh().world.rank == 3)))
    try:
        group.sum(1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_group_names_processes_by_their_rank_in_the_job() -> None:
    first, second, third, fourth = run_ranks(go_apart, world_size=4)

    assert first == third == ""
    assert "rank 1 was at all_gather of weights, 8 bytes while rank 3 was at" in second
    assert "rank 3 was at all_gather of weights, 16 bytes while rank 1 was at" in fourth


def test_groups_must_divide_the_processes() -> None:
    with pytest.raises(ConfigError, match="inference_tp_size 2 doesn't divide the 1 processes"):
        current_mesh().tp_group(2, timeout_seconds=60.0)


def place_in_copies() -> tuple[Any, ...]:
    before = current_mesh()
    with cut_mesh(replicas=2, timeout_seconds=60.0) as mesh:
        assert current_mesh() is mesh
        data = mesh.data
        assert isinstance(data, DataGroup)
        sums = data.sum(1), data.shards.sum(mesh.world.rank), data.copies.sum(mesh.world.rank)
    assert current_mesh().data == before.data
    return data.shards.ranks, data.copies.ranks, sums, mesh.shape


def test_a_copy_is_kept_by_neighbours_and_pieces_are_summed_across() -> None:
    shape = {"processes": 4, "stages": 1, "tensor": 1, "replicas": 2, "shards": 2}
    assert run_ranks(place_in_copies, world_size=4) == [
        ((0, 1), (0, 2), (4, 1, 2), shape),
        ((0, 1), (1, 3), (4, 1, 4), shape),
        ((2, 3), (0, 2), (4, 5, 2), shape),
        ((2, 3), (1, 3), (4, 5, 4), shape),
    ]


def meet() -> list[float]:
    """Sums of one axis while the other axis's processes are elsewhere."""
    group = subgroup([(0, 1), (2,)], timeout_seconds=60.0)
    return group.sums([1.0, float(torch.tensor(current_mesh().world.rank))])


def test_a_group_waits_for_nobody_outside() -> None:
    assert run_ranks(meet, world_size=3) == [[2.0, 1.0], [2.0, 1.0], [1.0, 2.0]]


def made() -> tuple[int, int]:
    """Groups that a process knows after a job of four is cut in pairs, and sums of two alike."""
    pairs = [(0, 1), (2, 3)]
    groups = [subgroup(pairs, timeout_seconds=60.0, counted=counted) for counted in (True, False)]
    return len(distributed_c10d._world.pg_map), int(sum(group.sum(1) for group in groups))


def test_a_process_makes_the_groups_that_it_is_in_and_no_others() -> None:
    assert run_ranks(made, world_size=4) == [(1 + 2, 2 + 2)] * 4
