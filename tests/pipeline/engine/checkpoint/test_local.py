"""Checkpoints on machines' own disks, and their way to the directory of the run."""

import ctypes
import logging
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline import faults
from pipeline.engine.checkpoint.find import newest
from pipeline.engine.checkpoint.host_copy import views
from pipeline.engine.checkpoint.local import LocalDirectory, LocalPart
from pipeline.engine.checkpoint.run_id import write_run_id
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.engine.local_start import LocalStart
from pipeline.engine.resume import newest_on_all
from pipeline.errors import CheckpointError, ConfigError
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import current_mesh
from tests.distributed import run_ranks
from tests.pipeline.engine.checkpoint.saving import assert_holds, fragments, visible, writer

NEW_HOST_NAME = 0x04000000
"""A name of the machine for this process alone: CLONE_NEWUTS."""


def saver_of(
    root: Path, disk: Path, *, rank: int = 0, world_size: int = 1, job: str = "job"
) -> CheckpointWriter:
    """A writer of that process, whose machine has that disk."""
    local = LocalDirectory(disk / "step1_sft-run", rank=rank, world_size=world_size)
    return writer(root, rank=rank, world_size=world_size, job=job, local=local)


def save_together(savers: Sequence[CheckpointWriter], step: int) -> None:
    """All processes save, as their training loops do."""
    kept = min(saver.newest_local for saver in savers)
    for rank, saver in enumerate(savers):
        pieces = fragments(step, rank=rank, world_size=len(savers))
        saver.save(step, pieces, {"step": step}, kept=kept)


def assert_newest(root: Path, step: int) -> None:
    """The newest checkpoint there is whole, and that of `step`."""
    checkpoint, passed_over = newest(root)
    assert checkpoint is not None
    assert not passed_over
    assert_holds(checkpoint, step)


def assert_resumed(before: LocalStart, root: Path, step: int) -> None:
    """A job goes on from that step, which it reads where it is near."""
    checkpoint = newest_on_all(root, Group(), near=before.near)
    assert checkpoint is not None
    assert_holds(checkpoint, step)


def two_nodes(root: Path, tmp_path: Path) -> list[CheckpointWriter]:
    return [saver_of(root, tmp_path / f"disk{rank}", rank=rank, world_size=2) for rank in (0, 1)]


def parts_on(disk: Path) -> list[int]:
    """The steps of the whole parts there."""
    return sorted(LocalPart.read(path).identity.step for path in disk.glob("*/rank-*/step_*"))


def fail_at(monkeypatch: pytest.MonkeyPatch, fault: str | None) -> None:
    monkeypatch.setattr(faults, "_text", fault)
    faults._visits.clear()


def start(root: Path, disk: Path, *, goes_on: bool = True, job: str = "next") -> LocalStart:
    return LocalStart(str(disk), root, Group(), job=job, goes_on=goes_on)


def killed_before_upload(tmp_path: Path, *steps: int) -> tuple[Path, Path]:
    """Checkpoints of two processes on one disk of which none has come to the run's directory."""
    root, disk = tmp_path / "step1_sft" / "checkpoints", tmp_path / "disk"
    root.mkdir(parents=True)
    write_run_id(root, "run")
    for rank in (0, 1):
        local = LocalDirectory(disk / "step1_sft-run", rank=rank, world_size=2)
        for step in steps:
            pieces = views(fragments(step, rank=rank, world_size=2))
            state = {"step": step} if rank == 0 else None
            local.write(step, f"job.{step}", pieces, base=None, state=state)
    return root, disk


def test_a_save_is_on_the_disks_of_both_machines_and_then_in_the_directory_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "out"
    savers = two_nodes(root, tmp_path)

    with caplog.at_level(logging.INFO):
        save_together(savers, 3)
        for saver in savers:
            saver.wait()

    assert_newest(root, 3)
    assert visible(root) == ["latest", "step_00000003"]
    assert [parts_on(tmp_path / f"disk{rank}") for rank in (0, 1)] == [[3], [3]]
    assert not list((tmp_path / "disk0").rglob("rank-00001*"))
    (upload,) = savers[0].take_uploads()
    assert (upload.step, upload.nbytes) == (3, sum(f.stat().st_size for f in root.rglob("*.saf*")))
    saved, copied = (record.getMessage() for record in caplog.records)
    assert saved.startswith(
        f"the state after step 3 is saved in {tmp_path}/disk0/step1_sft-run; it held up training"
    )
    assert copied.startswith(
        f"the state after step 3 is in {root}/step_00000003; copying its {upload.nbytes:,} bytes"
    )


def test_training_goes_on_while_one_checkpoint_is_copied_and_waits_where_two_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, disk = tmp_path / "out", tmp_path / "disk"
    saver = saver_of(root, disk)
    may_copy = threading.Event()
    monkeypatch.setattr(
        "pipeline.engine.checkpoint.attempt.copy_data_file",
        _after(may_copy, "pipeline.engine.checkpoint.data_file"),
    )

    for step in (1, 2):
        save_together([saver], step)
    assert saver.newest_local == 2
    assert not list(root.glob("step_*"))
    third = threading.Thread(target=save_together, args=([saver], 3))
    third.start()
    third.join(0.3)
    waited = third.is_alive()
    on_disk = parts_on(disk)
    may_copy.set()
    third.join()
    saver.close()

    assert waited
    assert on_disk == [1, 2]
    assert parts_on(disk) == [2, 3]
    assert visible(root) == ["latest", "step_00000002", "step_00000003"]


def _after(event: threading.Event, module: str) -> object:
    """The module's `copy_data_file`, once something has happened."""
    import importlib

    copy = importlib.import_module(module).copy_data_file

    def waiting(*args: object) -> None:
        event.wait()
        copy(*args)

    return waiting


def test_a_full_disk_of_one_machine_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "out"
    savers = two_nodes(root, tmp_path)
    fail_at(monkeypatch, "local.before_rename:*:1:enospc")  # of whichever comes first

    save_together(savers, 1)
    for saver in savers:
        saver.wait()

    assert "No space left on device" in caplog.text
    assert f"its part of step 1 goes straight to {root}" in caplog.text
    assert sorted(saver.newest_local for saver in savers) == [-1, 1]
    assert_newest(root, 1)
    save_together(savers, 2)
    for saver in savers:
        saver.close()
    assert_newest(root, 2)
    assert [parts_on(tmp_path / f"disk{rank}") for rank in (0, 1)] == [[2], [2]]


def test_while_the_shared_directory_is_gone_the_newest_state_that_all_machines_have_stays(
    tmp_path: Path,
) -> None:
    root, away = tmp_path / "out", tmp_path / "away"
    savers = two_nodes(root, tmp_path)
    save_together(savers, 1)
    for saver in savers:
        saver.wait()
    root.rename(away)

    for step in (2, 3, 4):
        save_together(savers, step)
    for saver in savers:
        saver.wait()

    assert [parts_on(tmp_path / f"disk{rank}") for rank in (0, 1)] == [[3, 4], [3, 4]]
    assert not root.exists()
    assert f"saving step 4, which stays in {tmp_path}/disk0" in str(savers[0].failure)
    assert "No such file or directory" in str(savers[0].failure)
    away.rename(root)
    kept = min(saver.newest_local for saver in savers)
    for saver in savers:
        saver.upload_again(kept)
    for saver in savers:
        saver.close()
    assert [saver.failure for saver in savers] == [None, None]
    assert_newest(root, 4)


def test_a_part_that_only_some_machines_have_replaces_none_that_all_have(tmp_path: Path) -> None:
    root = tmp_path / "out"
    savers = two_nodes(root, tmp_path)
    save_together(savers, 1)
    for saver in savers:
        saver.wait()
    root.rename(tmp_path / "away")
    assert savers[1].uploads is not None
    savers[1].uploads.directory._own = tmp_path / "away" / "latest" / "none"  # can't be made

    for step in (2, 3):
        save_together(savers, step)
    for saver in savers:
        saver.wait()

    assert parts_on(tmp_path / "disk0") == [1, 3]
    assert parts_on(tmp_path / "disk1") == [1]


def test_the_next_job_copies_what_was_only_on_the_disks_whoever_is_there(tmp_path: Path) -> None:
    root, disk = killed_before_upload(tmp_path, 4, 5)
    before = start(root, disk)  # one process, where there were two

    before.upload_newest(lambda _state: True)

    checkpoint = newest_on_all(root, Group(), near=before.near)
    assert checkpoint is not None
    assert_holds(checkpoint, 5)
    assert visible(root) == ["latest", "local.json", "step_00000005"]
    assert before.settle(checkpoint.manifest.attempt) is None
    assert visible(disk / "step1_sft-run") == ["rank-00000-of-00001"]


def test_what_is_near_is_read_there_and_elsewhere_where_it_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, disk = killed_before_upload(tmp_path, 5)
    before = start(root, disk)
    before.upload_newest(lambda _state: True)
    (there,) = root.glob("step_*/rank-00001*")
    whole = there.read_bytes()
    there.write_bytes(bytes(len(whole)))

    assert_resumed(before, root, 5)

    there.write_bytes(whole)
    (near,) = disk.rglob("rank-00001*.safetensors")
    near.write_bytes(near.read_bytes()[:-3] + b"???")
    assert_resumed(before, root, 5)
    assert f"{near} is damaged" in caplog.text
    assert f"reading it in {root}" in caplog.text


def test_a_machine_that_is_gone_costs_what_only_it_had(tmp_path: Path) -> None:
    root, disk = killed_before_upload(tmp_path, 5)
    for path in disk.rglob("rank-00001-of-*"):
        if path.is_dir():
            path.rename(tmp_path / "gone")
    before = start(root, disk)

    before.upload_newest(lambda _state: True)

    assert visible(root) == ["local.json"]
    before.settle(None)
    assert not list(disk.rglob("step_*"))


def test_a_damaged_part_is_never_copied_and_the_state_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, disk = killed_before_upload(tmp_path, 4, 5)
    (file,) = disk.rglob("step_00000005*/rank-00001*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = start(root, disk)

    before.upload_newest(lambda _state: True)

    assert f"{file} is damaged: it is not what its CRC-32 says; trying the one before" in (
        caplog.text
    )
    assert_newest(root, 4)
    assert visible(root) == ["latest", "local.json", "step_00000004"]


def test_a_state_that_a_run_has_gone_back_from_is_not_taken(tmp_path: Path) -> None:
    root, disk = killed_before_upload(tmp_path, 4, 5)
    before = start(root, disk)

    before.upload_newest(lambda state: state["step"] < 5)

    assert_newest(root, 4)


def test_a_state_that_can_not_be_copied_at_the_start_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, disk = killed_before_upload(tmp_path, 5)
    before = start(root, disk)
    fail_at(monkeypatch, "upload.mid_file:*:1:enospc")

    with pytest.raises(
        CheckpointError, match=r"can't be copied to .*: No space left on device; mak"
    ):
        before.upload_newest(lambda _state: True)

    start(root, disk).upload_newest(lambda _state: True)
    assert_newest(root, 5)


def test_two_runs_may_share_a_disk_and_what_an_overwritten_run_left_there_is_removed(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    roots = [tmp_path / name / "step1_sft" / "checkpoints" for name in ("a", "b")]
    directories = []
    for number, root in enumerate(roots):
        root.mkdir(parents=True)
        begun = start(root, disk, goes_on=False, job=f"job{number}")
        begun.note()
        directories.append(begun.directory.root)
    assert directories == [disk / "step1_sft-job0", disk / "step1_sft-job1"]

    start(roots[0], disk, goes_on=False, job="job2")

    assert visible(disk) == ["step1_sft-job1", "step1_sft-job2"]
    assert start(roots[1], disk, job="job3").directory.root == directories[1]


def test_a_disk_that_is_no_directory_of_its_own_is_refused_or_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints"
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"local_checkpoints .*/file can't be written to: Not a d"
    ):
        start(root, tmp_path / "file")
    monkeypatch.delenv("NO_DISK", raising=False)
    with pytest.raises(ConfigError, match=r"\$NO_DISK/x: \$NO_DISK is not set on this machine"):
        LocalStart("$NO_DISK/x", root, Group(), job="job", goes_on=False)

    start(root, tmp_path / "disk")

    assert f"{tmp_path}/disk and {root} are on one disk" in caplog.text


def resume_as_two_machines(root: Path, disks: Sequence[Path]) -> tuple[list[str], list[str]]:
    """What the process logs, and what it has on its disk in the end."""
    world = current_mesh().world
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_HOST_NAME):
        return [], ["this user can't rename the machine"]
    name = f"machine{world.rank}"
    socket.sethostname(name)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("pipeline.engine.local_start").addHandler(handler)
    begun = LocalStart(str(disks[world.rank]), root, world, job="next", goes_on=True)
    begun.upload_newest(lambda _state: True)
    checkpoint = newest_on_all(root, world, near=begun.near)
    assert checkpoint is not None
    if world.rank == 0:  # it may read the other's part, which stays until both have read
        time.sleep(0.3)
    assert_holds(checkpoint, 5)
    begun.settle(checkpoint.manifest.attempt)
    world.barrier()
    return lines, visible(begun.directory.root)


@pytest.mark.jobs
@pytest.mark.parametrize("shared", [False, True])
def test_a_directory_that_several_machines_share_is_warned_of_and_works(
    shared: bool, tmp_path: Path
) -> None:
    root, disk = killed_before_upload(tmp_path, 5)
    disks = [disk, disk if shared else tmp_path / "other"]
    if not shared:  # the machine of the second process has its part
        (tmp_path / "other" / "step1_sft-run").mkdir(parents=True)
        part = "step1_sft-run/rank-00001-of-00002"
        (disk / part).rename(tmp_path / "other" / part)

    (lines, first), (_, second) = run_ranks(resume_as_two_machines, root, disks)

    if "can't rename" in first[0]:
        pytest.skip(first[0])
    warned = f"{disk} is one directory for several machines" in "\n".join(lines)
    assert warned == shared
    own = [["rank-00000-of-00002"], ["rank-00001-of-00002"]]
    both = [[*own[0], *own[1]]] * 2
    assert [first, second] == (both if shared else own)


def test_a_large_file_is_copied_whole_across_many_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine.checkpoint.data_file.COPY_BYTES", 1000)
    root = tmp_path / "out"
    saver = saver_of(root, tmp_path / "disk")

    save_together([saver], 1)
    saver.close()

    assert saver.failure is None
    assert_newest(root, 1)
