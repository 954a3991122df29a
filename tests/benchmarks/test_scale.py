"""What a job's processes ask of each other grows with their number, and not with its square."""

import argparse

import pytest

from benchmarks import scale, scale_fleet, scale_watch
from pipeline.watchdog.lookout import HEARTBEATS_A_SECOND


@pytest.mark.parametrize("size", [16, 256])
def test_a_look_asks_for_as_many_things_as_there_are_processes(size: int) -> None:
    look = scale_watch.look(size)

    # A heartbeat, a look for a failure and one at the turn of each, and one reads all heartbeats.
    assert look.requests <= 3.1 * size
    assert look.keys <= 4.1 * size
    assert look.num_bytes <= 500 * size


def test_larger_jobs_beat_less_often() -> None:
    paces = {size: scale_watch.Job(size, timeout_seconds=1800).processes[0] for size in (8, 1200)}

    assert paces[8].lookout.pace == 1.0
    assert paces[1200].lookout.pace == 1200 / HEARTBEATS_A_SECOND


@pytest.mark.jobs
def test_nobody_is_blamed_who_is_late_by_less_than_the_timeout_though_the_store_is_slow() -> None:
    job = scale_fleet.Fleet(24, timeout_seconds=1800, slow=0.05, seed=24)

    assert scale_watch.healthy(job, 24, 200, timeout_seconds=1800) is None
    assert len(job.store.turns) > 7000


@pytest.mark.parametrize(("size", "minutes", "slow"), [(24, 40, 0.05), (40, 35, 0.01)])
def test_many_processes_at_a_time_take_the_turns_of_each_by_itself(
    size: int, minutes: float, slow: float
) -> None:
    """Whose turn it is says when each looked, and for how long it had heard of whom."""
    turns: list[list[str]] = []
    for simulated in (scale_watch.Job, scale_fleet.Fleet):
        job = simulated(size, timeout_seconds=1800, slow=slow, seed=size)
        assert scale_watch.healthy(job, size, minutes, timeout_seconds=1800) is None
        turns.append(job.store.turns)

    assert turns[0] == turns[1]
    assert len(turns[0]) > 1000


def test_both_find_a_process_that_keeps_the_others_waiting_too_long() -> None:
    found: list[tuple[int, float]] = []
    for simulated in (scale_watch.Job, scale_fleet.Fleet):
        job = simulated(24, timeout_seconds=120, slow=0.05, seed=1)
        job.enter_collective()
        job.run(10.0)
        job.enter_collective(but=[5])
        job.run(200.0)
        assert job.found is not None
        found.append((job.found.rank, job.now))

    assert found[0] == found[1]
    assert found[0][0] == 5


def test_a_hanging_process_is_found_within_ten_seconds_of_its_deadline() -> None:
    found = list(scale_watch.detections(24, 10, slow=0.01))

    hangs = [seconds for kind, seconds in found if kind == "hangs"]
    assert len(hangs) == 5
    assert all(0 <= seconds < 10 for seconds in hangs)
    assert max(seconds for kind, seconds in found if kind == "lost") < 30


def test_the_manifest_of_a_job_has_a_line_of_each_process_and_none_of_its_tensors() -> None:
    args = argparse.Namespace()
    few, many = (scale.manifest(size, args)["manifest, kB"] for size in (64, 1024))

    assert float(many) - float(few) < 0.1 * (1024 - 64)


@pytest.mark.jobs
def test_every_part_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--ranks", "16", "24", "--minutes", "1", "--trials", "2"])

    printed = capsys.readouterr().out
    assert all(f"{part}:\n| processes | " in printed for part in scale.PARTS)
    assert printed.count("\n| 24 | ") == len(scale.PARTS)
