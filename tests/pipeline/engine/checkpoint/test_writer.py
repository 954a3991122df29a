"""Saving in the background, failed saves, and retention of checkpoints."""

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
from pipeline.engine.checkpoint.format import list_steps, parse_step
from pipeline.engine.checkpoint.history import RollbackRecord, list_candidates
from pipeline.system import faults
from pipeline.system.errors import CheckpointError, ConfigError
from tests.pipeline.engine.checkpoint.saving import (
    assert_has_step,
    list_names,
    make_fragments,
    make_writer,
    newest,
    run_processes,
    save,
    save_steps,
)

FILE = "rank-00000-of-00001.safetensors"
STEP_2 = "step_00000002"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with checkpoints of steps 1 and 2."""
    save(tmp_path, 1, 2)
    return tmp_path


def test_saved_values_are_those_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = ("checkpoint.before_write", "*", "1", "sleep-100")
    monkeypatch.setattr(faults, "_faults", [fault])
    faults._visits.clear()
    threads = set(threading.enumerate())
    writer = make_writer(tmp_path)
    fragments, state = make_fragments(1), {"step": 1}

    writer.save(1, fragments, state)
    for fragment in fragments:
        fragment.tensor.fill_(0)
    state["step"] = 99
    writer.wait(0)
    assert not (tmp_path / "step_00000001").exists()
    writer.save(2, make_fragments(2), {"step": 2})
    assert (tmp_path / "step_00000001").exists()  # the second save waits for the first
    writer.wait()

    for step in (1, 2):
        assert_has_step(Checkpoint.open(tmp_path / f"step_{step:08d}"), step)
    assert set(threading.enumerate()) == threads


def test_failed_save_is_logged_and_the_next_one_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoints"
    writer = make_writer(root)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = []
    with caplog.at_level(logging.INFO):
        for step, limit in ((1, limits[0]), (2, 10_000), (3, limits[0])):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            try:
                writer.save(step, make_fragments(step), {"step": step})
                writer.wait()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            lines.append([record.getMessage() for record in caplog.records])
            caplog.clear()
    writer.wait()

    (first,), (second,), (third,) = lines
    for step, line in ((1, first), (3, third)):
        assert line.startswith(f"saved the state after step {step} in {root}")
    assert second.startswith(f"saving step 2 to {root} failed: rank 0: File too large")
    assert list_names(root) == ["latest", "step_00000001", "step_00000003"]
    assert_has_step(newest(root)[0], 3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["before_write", "mid_file", "after_file"])
def test_failure_on_any_rank_costs_one_save(rank: int, point: str, tmp_path: Path) -> None:
    fault = f"checkpoint.{point}:{rank}:2:enospc"

    codes = run_processes(save_steps, tmp_path, [1, 2, 3], "job", world_size=2, fault=fault)

    assert codes == [0, 0]
    assert list_names(tmp_path) == ["latest", "step_00000001", "step_00000003"]
    assert_has_step(newest(tmp_path)[0], 3)


def test_unreferenced_bases_are_deleted(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for number, step in enumerate((1, 2, 3, 4)):
        writer.save_base(f"base-{number // 2}", make_fragments(0))
        writer.save(step, make_fragments(step), {"step": step}, base=f"base-{number // 2}")
    writer.wait()

    assert list_names(tmp_path) == ["base-1", "latest", "step_00000003", "step_00000004"]
    writer.save(5, make_fragments(5), {}, base="base-0")
    writer.wait()
    assert writer.failure is not None
    assert "the frozen weights base-0 are missing" in writer.failure
    assert list_names(tmp_path) == ["base-1", "latest", "step_00000003", "step_00000004"]


def test_valid_checkpoints_of_an_earlier_job_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, job="earlier")
    (tmp_path / STEP_2 / FILE).unlink()
    (tmp_path / ".writing-step_00000003-earlier.3").mkdir()
    (tmp_path / ".removing-step_00000001").mkdir()
    writer = make_writer(tmp_path)
    assert list_names(tmp_path) == ["latest", "step_00000001", STEP_2]
    writer.save(3, make_fragments(3), {"step": 3})
    writer.wait()

    assert list_names(tmp_path) == ["latest", "step_00000001", STEP_2, "step_00000003"]
    assert [parse_step(path) for path in list_candidates(tmp_path)] == [3, 2, 1]
    (tmp_path / "latest").write_text("step_00000002\n")
    assert [parse_step(path) for path in list_candidates(tmp_path)] == [2, 1, 3]


def test_impossible_saves_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        make_writer(tmp_path, keep_last=1)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be created"):
        make_writer(tmp_path / "file" / "in it")
    writer = make_writer(tmp_path, world_size=2, timeout_seconds=0.01)
    writer.save(1, make_fragments(1), {})
    writer.wait()
    assert "rank 1 did not report within 0.01 seconds" in str(writer.failure)
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path)  # tests may run as root
    with pytest.raises(ConfigError, match=f"^{tmp_path} can't be written to"):
        make_writer(tmp_path)


# --- damage ---------------------------------------------------------------------------------------


def test_every_flipped_bit_is_detected(root: Path) -> None:
    rng = random.Random(0)
    intact = root.parent / "intact"
    shutil.copytree(root / STEP_2, intact)
    for _ in range(100):
        shutil.copytree(intact, root / STEP_2, dirs_exist_ok=True)
        file = root / STEP_2 / rng.choice([FILE, "manifest.json"])
        size = file.stat().st_size
        in_header = rng.random() < 0.5  # half of the bits
        content = bytearray(file.read_bytes())
        content[rng.randrange(min(500, size) if in_header else size)] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
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
def test_damaged_file_is_skipped_with_a_warning(
    name: str, damage: Callable[[Path], object], root: Path
) -> None:
    file = root / STEP_2 / name

    damage(file)

    checkpoint, (warning,) = newest(root)
    assert_has_step(checkpoint, 1)
    assert f"{file} " in warning


# --- rollback -------------------------------------------------------------------------------------

HEALTHY = {"healthy": True}


def saved_steps(root: Path) -> list[int]:
    return [parse_step(path) or 0 for path in reversed(list_steps(root))]


def save_health(root: Path, healthy: dict[int, bool], *, margin: int | None) -> None:
    writer = make_writer(root, margin=margin)
    for step, is_healthy in healthy.items():
        writer.save(step, make_fragments(step), {"healthy": is_healthy})
    writer.wait()


@pytest.mark.parametrize(
    ("healthy", "margin", "expected"),
    [
        ([True] * 9, None, [7, 8]),
        ([True] * 9, 1, [7, 8]),
        ([True] * 9, 3, [5, 6, 7, 8]),
        # The newest healthy one at least 3 steps back is step 1; unhealthy ones are deleted.
        ([True, True, False, False, False, False, True, False, False], 3, [1, 6, 7, 8]),
        # It is kept however many unhealthy ones follow.
        ([True] + [False] * 8, 2, [0, 7, 8]),
    ],
)
def test_checkpoints_needed_for_a_rollback_are_kept(
    healthy: list[bool], margin: int | None, expected: list[int], tmp_path: Path
) -> None:
    save_health(tmp_path, dict(enumerate(healthy)), margin=margin)

    assert saved_steps(tmp_path) == expected


def test_rollback_removes_later_checkpoints_and_allows_saving_again(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, margin=9)
    for step in range(4):
        writer.save(step, make_fragments(step), HEALTHY)
    record = RollbackRecord(count=1, step=1, parts={"run": {"step": 1}})
    writer.roll_back(record.step)
    record.write(tmp_path)

    record.remove_later_steps(tmp_path)

    assert saved_steps(tmp_path) == [0, 1]
    assert RollbackRecord.read(tmp_path) == record
    assert record.invalidates(HEALTHY)
    assert not record.invalidates({"rollbacks": 1})
    writer.save(3, make_fragments(30), {"rollbacks": 1, **HEALTHY})
    writer.wait()
    checkpoint, skipped = newest(tmp_path)
    assert checkpoint
    assert (checkpoint.step, checkpoint.state["rollbacks"], skipped) == (3, 1, [])
