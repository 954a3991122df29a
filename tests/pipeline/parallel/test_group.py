"""A group's collectives say the same on every process, and alone they are the identity."""

from typing import Any

import pytest
import torch

from pipeline.data.batches import RowStream, local_micro_batches, micro_batches
from pipeline.parallel.mesh import current_mesh, split_mesh
from tests.distributed import run_ranks


def everything() -> dict[str, Any]:
    mesh = current_mesh()
    group = mesh.data
    mine = group.rank + 1
    stream = RowStream(num_rows=5, batch_size=3, seed=7)
    lengths = [9, 1, 1] if group.rank == 0 else [2]
    return {
        "place": (group.rank, group.size, mesh.is_main),
        "sum": group.sum(0.5 * mine),
        "sums": group.sums([mine, 10.0 * mine, 2.0**53 * group.rank]),
        "max": group.max(-mine),
        "objects": group.gather_objects({"rank": group.rank}),
        "share": group.shard(["a", "b", "c", "d", "e"]),
        "rows": [next(stream) for _ in range(4)],
        "cut": micro_batches([5, 4, 3, 2, 1], max_tokens=9, num_processes=2, process=group.rank),
        "local": local_micro_batches(lengths, max_tokens=9),
    }


def test_two_processes_agree_and_share_the_work() -> None:
    first, second = run_ranks(everything)

    assert first["place"] == (0, 2, True)
    assert second["place"] == (1, 2, False)
    for name, expected in {
        "sum": 1.5,
        "sums": [3.0, 30.0, 2.0**53],
        "max": -1.0,
        "objects": [{"rank": 0}, {"rank": 1}],
    }.items():
        assert first[name] == second[name] == expected
    assert first["share"] == ["a", "c", "e"]
    assert second["share"] == ["b", "d"]
    assert first["rows"] == second["rows"]
    assert sorted(row for part in first["cut"] + second["cut"] for row in part) == [0, 1, 2, 3, 4]
    assert len(first["cut"]) == len(second["cut"])
    # The second process has a single sequence and runs an empty pass during the first one's second.
    assert first["local"] == [[0], [1, 2]]
    assert second["local"] == [[0], []]


def told_in_pipelines() -> float:
    """Two stages of each of two pipelines tell each other what is as long as their rows."""
    with split_mesh(replicas=1, pp=2, timeout_seconds=60.0) as mesh:
        mesh.stages.broadcast(torch.zeros(3 + mesh.data.rank), source=1)
        return mesh.data.sum(1)


@pytest.mark.jobs
def test_pipelines_may_read_rows_of_different_lengths() -> None:
    assert run_ranks(told_in_pipelines, world_size=4) == [2.0] * 4
