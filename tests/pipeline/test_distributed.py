"""Collectives say the same on every process, and in a single one they are the identity."""

from typing import Any

from pipeline.data.batches import RowStream, local_micro_batches, micro_batches
from pipeline.distributed import (
    gather_objects,
    global_max,
    global_sum,
    global_sums,
    is_main,
    rank,
    share_of_rank,
    world_size,
)
from tests.distributed import run_ranks


def everything() -> dict[str, Any]:
    mine = rank() + 1
    stream = RowStream(num_rows=5, batch_size=3, seed=7)
    lengths = [9, 1, 1] if rank() == 0 else [2]
    return {
        "place": (rank(), world_size(), is_main()),
        "sum": global_sum(0.5 * mine),
        "sums": global_sums([mine, 10.0 * mine, 2.0**53 * rank()]),
        "max": global_max(-mine),
        "objects": gather_objects({"rank": rank()}),
        "share": share_of_rank(["a", "b", "c", "d", "e"]),
        "rows": [next(stream) for _ in range(4)],
        "cut": micro_batches([5, 4, 3, 2, 1], max_tokens=9, num_processes=2, process=rank()),
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
    # The second process has a single sequence and runs an empty pass beside the first one's second.
    assert first["local"] == [[0], [1, 2]]
    assert second["local"] == [[0], []]


def test_a_single_process_is_rank_0_of_1_and_sums_are_its_own() -> None:
    alone = everything()

    assert alone["place"] == (0, 1, True)
    assert (alone["sum"], alone["sums"], alone["max"]) == (0.5, [1.0, 10.0, 0.0], -1.0)
    assert alone["objects"] == [{"rank": 0}]
    assert alone["share"] == ["a", "b", "c", "d", "e"]
