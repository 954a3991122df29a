"""Training goes on while a checkpoint is written, and neither disturbs the other."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.layout import Fragment
from tests.pipeline.engine.checkpoint.saving import assert_holds, fragments, visible, writer
from tests.slow_disk import slow_down_writes


def test_the_file_holds_the_values_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down_writes(monkeypatch, seconds=0.1)
    saver = writer(tmp_path)
    pieces, state = fragments(1), {"step": 1}

    saver.save(1, pieces, state)
    for piece in pieces:
        piece.tensor.fill_(0)
    state["step"] = 99
    assert not (tmp_path / "step_00000001").exists()
    saver.close()

    assert_holds(Checkpoint.open(tmp_path / "step_00000001"), 1)


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down_writes(monkeypatch, seconds=0.1)
    saver = writer(tmp_path)

    saver.save(1, fragments(1), {"step": 1})
    before = (tmp_path / "step_00000001").exists()
    saver.save(2, fragments(2), {"step": 2})

    assert not before
    assert (tmp_path / "step_00000001").exists()
    saver.close()
    for step in (1, 2):
        assert_holds(Checkpoint.open(tmp_path / f"step_{step:08d}"), step)


def test_at_most_one_save_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, files = os.pwritev, []

    def watched(file: int, parts: Sequence[memoryview], position: int) -> int:
        files.append(Path(f"/proc/self/fd/{file}").readlink().parent.name)
        time.sleep(0.01)
        return write(file, parts, position)

    monkeypatch.setattr(os, "pwritev", watched)
    saver = writer(tmp_path)

    for step in range(1, 6):
        saver.save(step, fragments(step), {"step": step})
    saver.close()

    assert files == sorted(files)
    assert visible(tmp_path) == ["latest", "step_00000004", "step_00000005"]


def test_close_waits_and_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down_writes(monkeypatch, seconds=0.1)
    before = set(threading.enumerate())
    saver = writer(tmp_path)

    saver.save(1, fragments(1), {"step": 1})
    saver.close()

    assert_holds(Checkpoint.open(tmp_path / "step_00000001"), 1)
    assert set(threading.enumerate()) == before


def test_the_same_step_is_saved_once(tmp_path: Path) -> None:
    saver = writer(tmp_path)
    saver.save(1, fragments(1), {"step": 1})
    saver.wait()
    inode = (tmp_path / "step_00000001").stat().st_ino

    saver.save(1, fragments(1), {"step": 1})
    saver.close()

    assert (tmp_path / "step_00000001").stat().st_ino == inode


def test_the_memory_for_copies_is_kept_and_as_large_as_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine.checkpoint.host_copy.BLOCK_BYTES", 4096)
    saver = writer(tmp_path)
    blocks = saver._copy._logs[False]._blocks
    addresses = []

    for step, numel in enumerate([3000, 3000, 1000], start=1):
        saver.save(step, [Fragment("w", 0, torch.zeros(numel))], {})
        saver.wait()
        addresses.append([block.data_ptr() for block in blocks])

    assert addresses[0] == addresses[1]
    assert addresses[2] == addresses[0][:1]
    saver.close()


def test_memory_that_was_prepared_is_that_of_the_first_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine.checkpoint.host_copy.BLOCK_BYTES", 4096)
    saver = writer(tmp_path)
    saver.prepare(4 * 3000, pinned=False)
    saver.wait()
    blocks = saver._copy._logs[False]._blocks
    prepared = [block.data_ptr() for block in blocks]

    saver.save(1, [Fragment("w", 0, torch.ones(3000))], {})

    assert len(prepared) == 3
    assert [block.data_ptr() for block in blocks] == prepared
    saver.close()


def test_no_memory_ahead_is_left_to_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine.checkpoint.host_copy.BLOCK_BYTES", 2**60)
    saver = writer(tmp_path)

    saver.prepare(1, pinned=False)
    saver.save(1, fragments(1), {"step": 1})
    saver.close()

    assert saver.failure is not None
    assert "no host memory for a copy" in saver.failure


def test_saves_leave_no_open_files(tmp_path: Path) -> None:
    saver = writer(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))

    for step in range(1, 6):
        saver.save(step, fragments(step), {"step": step})
    saver.close()
    Checkpoint.open(tmp_path / "step_00000005").verify()

    assert len(list(Path("/proc/self/fd").iterdir())) == before
