"""Collectives of a group return the same on every process."""

from itertools import chain
from typing import Any

import pytest
import torch

from pipeline.data.batches import RowStream, local_micro_batches, micro_batches
from pipeline.parallel.mesh import current_mesh, split_mesh
from tests.distributed import run_ranks


def use_group() -> dict[str, Any]:
    mesh = current_mesh()
    group = mesh.data
    number = group.rank + 1
    stream = RowStream(num_rows=5, batch_size=3, seed=7)
    lengths = [9, 1, 1] if group.rank == 0 else [2]
    return {
        "position": (group.rank, group.size, mesh.is_main),
        "sum": group.sum(0.5 * number),
        "sums": group.sums([number, 10.0 * number, 2.0**53 * group.rank]),
        "max": group.max(-number),
        "objects": group.gather_objects({"rank": group.rank}),
        "share": group.shard(["a", "b", "c", "d", "e"]),
        "rows": [next(stream) for _ in range(4)],
        "batches": micro_batches(
            [5, 4, 3, 2, 1], max_tokens=9, num_processes=2, process=group.rank
        ),
        "local": local_micro_batches(lengths, max_tokens=9),
    }


def test_collectives_agree_and_work_is_distributed() -> None:
    first, second = run_ranks(use_group)

    assert first["position"] == (0, 2, True)
    assert second["position"] == (1, 2, False)
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
    assert sorted(chain(*first["batches"], *second["batches"])) == [0, 1, 2, 3, 4]
    assert len(first["batches"]) == len(second["batches"])
    # The second process has one sequence, and runs an empty pass as the first runs its second.
    assert first["local"] == [[0], [1, 2]]
    assert second["local"] == [[0], []]


def broadcast_in_pipelines() -> float:
    """Broadcast tensors of different lengths in two pipelines of two stages."""
    with split_mesh(replicas=1, pp=2, timeout_seconds=60.0) as mesh:
        mesh.stages.broadcast(torch.zeros(3 + mesh.data.rank), source=1)
        return mesh.data.sum(1)


@pytest.mark.jobs
def test_pipelines_can_have_rows_of_different_lengths() -> None:
    assert run_ranks(broadcast_in_pipelines, world_size=4) == [2.0] * 4
