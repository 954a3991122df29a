"""What a job's processes ask of each other grows with their number, and not with its square."""

import argparse

import pytest

from benchmarks import scale, scale_watch
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
    assert scale_watch.healthy(24, 40, slow=0.05, timeout_seconds=1800) is None


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
