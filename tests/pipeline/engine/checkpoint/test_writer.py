"""Saving in the background, failed saves, and the checkpoints that are kept."""

import logging
import os
import random
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import step_of, steps_in
from pipeline.engine.checkpoint.history import RollbackRecord, candidates
from pipeline.system import faults
from pipeline.system.errors import CheckpointError, ConfigError
from tests.pipeline.engine.checkpoint.saving import (
    assert_holds,
    fragments,
    newest,
    run_processes,
    save,
    save_steps,
    visible,
    writer,
)

FILE = "rank-00000-of-00001.safetensors"
STEP_2 = "step_00000002"


def arm(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(faults, "_faults", [tuple(fault.split(":"))])
    faults._visits.clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 and 2."""
    save(tmp_path, 1, 2)
    return tmp_path


def test_the_file_holds_the_values_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm(monkeypatch, "checkpoint.before_write:*:1:sleep-100")
    threads = set(threading.enumerate())
    saver = writer(tmp_path)
    pieces, state = fragments(1), {"step": 1}

    saver.save(1, pieces, state)
    for piece in pieces:
        piece.tensor.fill_(0)
    state["step"] = 99
    assert not (tmp_path / "step_00000001").exists()
    saver.save(2, fragments(2), {"step": 2})
    assert (tmp_path / "step_00000001").exists()  # the second save waits for the first
    saver.wait()

    for step in (1, 2):
        assert_holds(Checkpoint.open(tmp_path / f"step_{step:08d}"), step)
    assert set(threading.enumerate()) == threads


def test_a_failed_save_is_logged_and_the_next_one_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoints"
    saver = writer(root)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = []
    with caplog.at_level(logging.INFO):
        for step, most in ((1, limits[0]), (2, 10_000), (3, limits[0])):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            try:
                saver.save(step, fragments(step), {"step": step})
                saver.wait()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            lines.append([record.getMessage() for record in caplog.records])
            caplog.clear()
    saver.wait()

    (first,), (second,), (third,) = lines
    for step, line in ((1, first), (3, third)):
        assert line.startswith(f"saved the state after step {step} in {root}")
    assert second.startswith(f"saving step 2 to {root} failed: rank 0: File too large")
    assert visible(root) == ["latest", "step_00000001", "step_00000003"]
    assert_holds(newest(root)[0], 3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["before_write", "mid_file", "after_file"])
def test_a_failure_on_any_rank_costs_one_save(rank: int, point: str, tmp_path: Path) -> None:
    fault = f"checkpoint.{point}:{rank}:2:enospc"

    codes = run_processes(save_steps, tmp_path, [1, 2, 3], "job", world_size=2, fault=fault)

    assert codes == [0, 0]
    assert visible(tmp_path) == ["latest", "step_00000001", "step_00000003"]
    assert_holds(newest(tmp_path)[0], 3)


def test_bases_that_no_checkpoint_names_are_deleted(tmp_path: Path) -> None:
    saver = writer(tmp_path)
    for number, step in enumerate((1, 2, 3, 4)):
        saver.save_base(f"base-{number // 2}", fragments(0))
        saver.save(step, fragments(step), {"step": step}, base=f"base-{number // 2}")
    saver.wait()

    assert visible(tmp_path) == ["base-1", "latest", "step_00000003", "step_00000004"]
    saver.save(5, fragments(5), {}, base="base-0")
    saver.wait()
    assert saver.failure is not None
    assert "the frozen weights base-0 are missing" in saver.failure
    assert visible(tmp_path) == ["base-1", "latest", "step_00000003", "step_00000004"]


def test_checkpoints_of_an_earlier_job_count_if_they_verify(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, job="earlier")
    (tmp_path / STEP_2 / FILE).unlink()
    (tmp_path / ".writing-step_00000003-earlier.3").mkdir()
    (tmp_path / ".removing-step_00000001").mkdir()
    saver = writer(tmp_path)
    assert visible(tmp_path) == ["latest", "step_00000001", STEP_2]
    saver.save(3, fragments(3), {"step": 3})
    saver.wait()

    assert visible(tmp_path) == ["latest", "step_00000001", STEP_2, "step_00000003"]
    assert [step_of(path) for path in candidates(tmp_path)] == [3, 2, 1]
    (tmp_path / "latest").write_text("step_00000002\n")
    assert [step_of(path) for path in candidates(tmp_path)] == [2, 1, 3]


def test_what_can_not_be_saved_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        writer(tmp_path, keep_last=1)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be created"):
        writer(tmp_path / "file" / "in it")
    alone = writer(tmp_path, world_size=2, timeout_seconds=0.01)
    alone.save(1, fragments(1), {})
    alone.wait()
    assert "rank 1 did not report within 0.01 seconds" in str(alone.failure)
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path)  # root may write to all
    with pytest.raises(ConfigError, match=f"^{tmp_path} can't be written to"):
        writer(tmp_path)


# --- damage ---------------------------------------------------------------------------------------


def flip(file: Path, position: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


def test_every_flipped_bit_is_noticed(root: Path) -> None:
    choose = random.Random(0)
    intact = root.parent / "intact"
    shutil.copytree(root / STEP_2, intact)
    for _ in range(100):
        shutil.copytree(intact, root / STEP_2, dirs_exist_ok=True)
        file = root / STEP_2 / choose.choice([FILE, "manifest.json"])
        size = file.stat().st_size
        near = choose.random() < 0.5  # half of them in the header
        flip(file, choose.randrange(min(500, size) if near else size), choose.randrange(8))
        with pytest.raises(CheckpointError):
            Checkpoint.open(file.parent).verify()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (FILE, lambda file: os.truncate(file, 20_000)),
        (FILE, Path.unlink),
        (FILE, lambda file: file.write_bytes(file.read_bytes() + b"x")),
        ("manifest.json", lambda file: os.truncate(file, 100)),
        ("manifest.json", Path.unlink),
        ("manifest.json", lambda file: file.write_bytes(b"\xff\x00")),
        ("manifest.json", lambda file: file.write_text("[" * 99_999)),
        ("manifest.json", lambda file: file.write_text('{"manifest": {}, "crc32": 0}')),
    ],
)
def test_a_truncated_missing_or_foreign_file_is_refused_by_name(
    name: str, damage: Callable[[Path], object], root: Path
) -> None:
    file = root / STEP_2 / name

    damage(file)

    checkpoint, (warning,) = newest(root)
    assert_holds(checkpoint, 1)
    assert f"{file} " in warning


# --- rollback -------------------------------------------------------------------------------------

HEALTHY = {"healthy": True}


def steps(root: Path) -> list[int]:
    return [step_of(path) or 0 for path in reversed(steps_in(root))]


def save_health(root: Path, healthy: dict[int, bool], *, margin: int | None) -> None:
    saver = writer(root, margin=margin)
    for step, is_healthy in healthy.items():
        saver.save(step, fragments(step), {"healthy": is_healthy})
    saver.wait()


@pytest.mark.parametrize(
    ("healthy", "margin", "left"),
    [
        ([True] * 9, None, [7, 8]),
        ([True] * 9, 1, [7, 8]),
        ([True] * 9, 3, [5, 6, 7, 8]),
        # The newest healthy one 3 steps back is step 1; unhealthy ones go.
        ([True, True, False, False, False, False, True, False, False], 3, [1, 6, 7, 8]),
        # And it stays however many unhealthy ones follow.
        ([True] + [False] * 8, 2, [0, 7, 8]),
    ],
)
def test_checkpoints_that_a_rollback_needs_are_kept(
    healthy: list[bool], margin: int | None, left: list[int], tmp_path: Path
) -> None:
    save_health(tmp_path, dict(enumerate(healthy)), margin=margin)

    assert steps(tmp_path) == left


def test_a_rollback_removes_later_checkpoints_and_the_step_is_saved_again(tmp_path: Path) -> None:
    saver = writer(tmp_path, margin=9)
    for step in range(4):
        saver.save(step, fragments(step), HEALTHY)
    record = RollbackRecord(count=1, step=1, parts={"run": {"step": 1}})
    saver.roll_back(record.step)
    record.write(tmp_path)

    record.remove_later(tmp_path)

    assert steps(tmp_path) == [0, 1]
    assert RollbackRecord.read(tmp_path) == record
    assert record.invalidates(HEALTHY)
    assert not record.invalidates({"rollbacks": 1})
    saver.save(3, fragments(30), {"rollbacks": 1, **HEALTHY})
    saver.wait()
    checkpoint, skipped = newest(tmp_path)
    assert checkpoint
    assert (checkpoint.step, checkpoint.state["rollbacks"], skipped) == (3, 1, [])
