"""A save that fails costs nothing but itself."""

import logging
import os
import resource
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline import faults
from pipeline.engine.checkpoint.find import newest
from pipeline.engine.checkpoint.layout import Fragment
from pipeline.errors import ConfigError
from tests.pipeline.engine.checkpoint.saving import (
    POINTS,
    assert_holds,
    fragments,
    run_processes,
    save,
    visible,
    writer,
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can't be mounted here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def arm(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(faults, "_text", fault)
    faults._visits.clear()


def test_a_full_disk_costs_one_save_and_leaves_the_others(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, ballast = small_disk / "checkpoints", small_disk / "ballast"
    save(root, 1, 2)
    saver = writer(root, job="next")
    ballast.write_bytes(bytes(1_048_576 - 2 * 60_000))

    saver.save(3, fragments(3), {"step": 3})
    saver.wait()

    assert saver.failure == (
        f"saving step 3 to {root} failed: rank 0: No space left on device"
        " (40,007 bytes needed); training continues, and the next save tries again"
    )
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == [saver.failure]
    assert "step 3 is saved in" not in caplog.text
    assert visible(root) == ["latest", "step_00000001", "step_00000002"]
    assert_holds(newest(root)[0], 2)
    ballast.unlink()
    saver.save(4, fragments(4), {"step": 4})
    saver.close()
    assert saver.failure is None
    assert_holds(newest(root)[0], 4)


def test_only_what_was_saved_is_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoints"
    saver = writer(root)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = []
    with caplog.at_level(logging.INFO):
        for step, most in ((1, limits[0]), (2, 10_000), (3, limits[0])):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            try:
                saver.save(step, fragments(step), {"step": step})
                saver.wait()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            said.append([record.getMessage() for record in caplog.records])
            caplog.clear()
    saver.close()

    (first,), (second,), (third,) = said
    for step, line in ((1, first), (3, third)):
        where = root / f"step_0000000{step}"
        assert line.startswith(f"the state after step {step} is saved in {where}; it held up")
    assert second.startswith(f"saving step 2 to {root} failed: rank 0: File too large")


def test_a_disk_that_is_read_only_is_named_at_the_start(small_disk: Path) -> None:
    root = small_disk / "checkpoints"
    root.mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    with pytest.raises(ConfigError, match=f"{root} can't be written to"):
        writer(root)
    with pytest.raises(ConfigError, match="new can't be made: Read-only file system"):
        writer(small_disk / "new")


def test_a_disk_that_turns_read_only_costs_saves_only(small_disk: Path) -> None:
    root = small_disk / "checkpoints"
    saver = writer(root)
    saver.save(1, fragments(1), {"step": 1})
    saver.wait()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    saver.save(2, fragments(2), {"step": 2})
    saver.wait()

    assert saver.failure is not None
    assert f"rank 0: Read-only file system at {root}" in saver.failure
    assert_holds(newest(root)[0], 1)


def limited(rank: int, world_size: int, root: Path) -> None:
    saver = writer(root, rank=rank, world_size=world_size)
    if rank == 1:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    for step in (1, 2):
        saver.save(step, fragments(step, rank=rank, world_size=world_size), {"step": step})
        saver.wait()
        (root / f"failure-{rank}-{step}").write_text(str(saver.failure))
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_all_processes_learn_which_one_could_not_write(tmp_path: Path) -> None:
    codes = run_processes(limited, tmp_path, world_size=3)

    assert codes == [0, 0, 0]
    first = {(tmp_path / f"failure-{rank}-1").read_text() for rank in range(3)}
    assert len(first) == 1
    assert ": rank 1: File too large (13,339 bytes needed)" in first.pop()
    assert all((tmp_path / f"failure-{rank}-2").read_text() == "None" for rank in range(3))
    assert_holds(newest(tmp_path)[0], 2)


@pytest.mark.parametrize("action", ["eio", "raise"])
@pytest.mark.parametrize("point", POINTS)
def test_a_fault_anywhere_in_saving_never_reaches_training(
    point: str, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    saver = writer(tmp_path, job="next")
    arm(monkeypatch, f"checkpoint.{point}:0:1:{action}")

    saver.save(3, fragments(3), {"step": 3})
    saver.wait()

    assert newest(tmp_path)[1] == []
    assert newest(tmp_path)[0].step in (2, 3)
    saver.save(4, fragments(4), {"step": 4})
    saver.close()
    assert saver.failure is None
    assert_holds(newest(tmp_path)[0], 4)


def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    saver = writer(tmp_path, rank=0, world_size=3, timeout_seconds=0.1)

    saver.save(1, fragments(1), {})
    saver.close()

    assert saver.failure is not None
    assert "nothing came from rank 1, 2 within 0.1 seconds" in saver.failure
    assert not list(tmp_path.rglob("*.safetensors"))


def test_without_the_first_process_the_others_give_up_in_time(tmp_path: Path) -> None:
    saver = writer(tmp_path, rank=1, world_size=2, timeout_seconds=0.1)

    saver.save(1, fragments(1), {})
    saver.close()

    assert saver.failure is not None
    assert "rank 0 gave no answer within 0.2 seconds" in saver.failure


def test_a_failed_attempt_leaves_nothing_after_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm(monkeypatch, "checkpoint.after_file:*:1:eio")

    def rank(index: int) -> None:
        saver = writer(tmp_path, rank=index, world_size=2)
        for step in (1, 2):
            saver.save(step, fragments(step, rank=index, world_size=2), {"step": step})
        saver.close()

    threads = [threading.Thread(target=rank, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert visible(tmp_path) == ["latest", "step_00000002"]


def test_no_memory_for_the_copy_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine.checkpoint.host_copy.BLOCK_BYTES", 2**60)
    seen = []

    def gathered() -> Iterator[Fragment]:
        for fragment in fragments(1):
            seen.append(fragment.key)
            yield fragment

    saver = writer(tmp_path)
    saver.save(1, gathered(), {})
    saver.close()

    assert saver.failure is not None
    assert "no host memory for a copy" in saver.failure
    assert seen == ["actor/w", "rng/0"]


def test_a_save_whose_frozen_weights_are_missing_is_not_committed(tmp_path: Path) -> None:
    saver = writer(tmp_path)

    saver.save(1, fragments(1), {}, base="base-00")
    saver.close()

    assert saver.failure is not None
    assert f"{tmp_path}/base-00/manifest.json is missing" in saver.failure
    assert visible(tmp_path) == []


def without_permission(rank: int, world_size: int, directory: Path) -> None:
    if os.geteuid() == 0:  # whom no permission stops
        os.setuid(65534)
    with pytest.raises(ConfigError, match="checkpoints can't be made: Permission denied"):
        writer(directory / "checkpoints", rank=rank, world_size=world_size)
    root = directory / "open" / "mine"
    saver = writer(root)
    root.chmod(0o500)
    saver.save(1, fragments(1), {"step": 1})
    saver.wait()
    assert "rank 0: Permission denied" in str(saver.failure)
    root.chmod(0o700)
    saver.save(1, fragments(1), {"step": 1})
    saver.close()
    assert_holds(newest(root)[0], 1)


def test_permissions_are_errors_at_the_start_and_failed_saves_later() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "open").mkdir()
        (directory / "open").chmod(0o777)
        directory.chmod(0o555)

        assert run_processes(without_permission, directory, world_size=1) == [0]

        directory.chmod(0o700)


def test_what_a_checkpoint_can_not_hold_fails_with_its_name(tmp_path: Path) -> None:
    saver = writer(tmp_path)

    saver.save(1, [Fragment("w", 0, torch.zeros(1, dtype=torch.complex64))], {})
    saver.close()

    assert saver.failure is not None
    assert "w|0:1 is torch.complex64, which a checkpoint can't hold" in saver.failure


def test_only_the_first_process_writes_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = writer(tmp_path, rank=1, world_size=2, timeout_seconds=0.05)

    with caplog.at_level(logging.DEBUG):
        saver.save(1, fragments(1), {})
        saver.close()

    assert not caplog.messages


def test_a_process_that_gave_up_waiting_still_comes_to_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = writer(tmp_path, rank=0, world_size=2)
    second = writer(tmp_path, rank=1, world_size=2, timeout_seconds=0.05)
    arm(monkeypatch, "checkpoint.before_manifest:*:1:sleep-300")
    for saver in (second, first):
        saver.save(1, fragments(1, rank=saver._rank, world_size=2), {"step": 1})
    first.wait()
    second.wait()
    assert first.failure is None
    assert second.failure is not None

    for saver in (second, first):  # the one skips a step that the other knows nothing of
        saver.save(1, fragments(1, rank=saver._rank, world_size=2), {"step": 1})
    second.wait()
    second._timeout_seconds = 20
    for saver in (second, first):
        saver.save(2, fragments(2, rank=saver._rank, world_size=2), {"step": 2})
    first.close()
    second.close()

    assert (first.failure, second.failure) == (None, None)
    assert_holds(newest(tmp_path)[0], 2)
