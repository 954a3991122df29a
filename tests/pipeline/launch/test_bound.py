import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.launch.bound import cores_of, places_of

HYPERTHREADS = {cpu: (cpu % 4 // 2, cpu % 2) for cpu in range(8)}
"""Two sockets of two cores of two threads; 0 and 4 are the same core, as Linux numbers them."""


@pytest.mark.parametrize(
    ("processes", "shares"),
    [
        (1, [{0, 1, 2, 3, 4, 5, 6, 7}]),
        (2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (3, [{0, 4}, {1, 5}, {2, 3, 6, 7}]),
        (8, [{0}, {4}, {1}, {5}, {2}, {6}, {3}, {7}]),
    ],
)
def test_cores_are_shared_out_whole_and_socket_by_socket(
    processes: int, shares: list[set[int]]
) -> None:
    found = [cores_of(rank, processes, range(8), HYPERTHREADS) for rank in range(processes)]

    assert found == shares


def test_more_processes_than_cores_take_turns() -> None:
    assert [cores_of(rank, 3, [5, 6], {}) for rank in range(3)] == [{5}, {6}, {5}]


def test_only_cores_that_may_be_used_are_shared_out() -> None:
    assert cores_of(1, 2, [2, 6, 3, 7], HYPERTHREADS) == {3, 7}


def test_the_system_tells_the_place_of_every_cpu() -> None:
    allowed = sorted(os.sched_getaffinity(0))

    assert set(places_of(allowed)) <= set(allowed)


def test_a_module_runs_on_its_cores_as_itself(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(
        "import os, sys\nprint(__name__, sys.argv[1:], sorted(os.sched_getaffinity(0)))\n"
    )
    allowed = sorted(os.sched_getaffinity(0))
    root = Path(__file__).parents[3]

    said = subprocess.run(
        [sys.executable, "-m", "pipeline.launch.bound", "shows", "--a", "b"],
        env={
            **os.environ,
            "PYTHONPATH": f"{root}:{tmp_path}",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": str(len(allowed)),
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert said.startswith("__main__ ['--a', 'b'] ")
    if len(allowed) > 1:
        assert len(said.partition("] ")[2].split(",")) == 1
