"""Jobs whose machines have disks of their own, to which checkpoints are written first."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.budget.checkpoint import checkpoint_bytes
from pipeline.budget.machine import Machine
from pipeline.config import StepConfig
from tests.faults.jobs import Forked, assert_prefix, assert_same_end, run_forked, small
from tests.test_resume import metrics, saved

LOCAL = "$DISK/checkpoints"

POINTS = [
    pytest.param("local.before_rename", 4, 3, marks=pytest.mark.faults),
    pytest.param("local.after_rename", 4, 3, marks=pytest.mark.faults),
    pytest.param("upload.before_copy", 4, 4, marks=pytest.mark.faults),
    ("upload.mid_file", 4, 4),
    pytest.param("upload.after_file", 4, 4, marks=pytest.mark.faults),
    pytest.param("checkpoint.mid_file", 5, 3, marks=pytest.mark.faults),  # one is frozen weights'
    pytest.param("checkpoint.before_manifest", 5, 4, marks=pytest.mark.faults),
    pytest.param("checkpoint.before_rename", 5, 4, marks=pytest.mark.faults),
    pytest.param("checkpoint.after_rename", 5, 4, marks=pytest.mark.faults),
    pytest.param("checkpoint.before_latest", 4, 4, marks=pytest.mark.faults),
]
"""Where the fourth save ends, at which visit, and the step whose state is whole by then."""


def disks_of(tmp_path: Path, count: int = 2) -> list[Path]:
    disks = [tmp_path / f"machine{number}" for number in range(count)]
    for disk in disks:
        disk.mkdir()
    return disks


def job(start: Path, tmp_path: Path, step: str = "sft", **changes: Any) -> StepConfig:
    return small(start, step, output_dir=tmp_path / "out", local_checkpoints=LOCAL, **changes)


def step_after(job: Forked) -> int:
    """After which step a resumed job went on."""
    (line,) = [line for line in job.output().splitlines() if "goes on after step" in line]
    return int(line.rpartition(" ")[2])


def trained_bytes(out: Path, step: int) -> int:
    """Of a checkpoint, without frozen weights and the state of generators of random numbers."""
    tensors = saved(out, step)
    return sum(
        tensor.nbytes
        for key, tensor in tensors.items()
        if not key.startswith("random/") and "/frozen/" not in key and "/buffers/" not in key
    )


@pytest.mark.jobs
def test_a_job_with_disks_of_its_machines_ends_as_one_without(
    start: Path, reference: Path, tmp_path: Path
) -> None:
    config, disks = job(start, tmp_path), disks_of(tmp_path)

    with Forked(config, disks=disks) as running:
        assert running.wait() == [0, 0], running.output()
        output = running.output()

    assert_same_end(config.output_dir, reference, step=8)
    machine = Machine(processes=2, world=2, gpu_bytes=None, host_bytes=None)
    assert trained_bytes(config.output_dir, 8) == checkpoint_bytes(config, machine, {})
    assert [list(disk.glob("checkpoints/*")) for disk in disks] == [[], []]  # all is copied
    assert f"is saved in {disks[0]}/checkpoints/out-" in output
    result = (config.output_dir / "result.json").read_text()
    assert '"uploads": {' in result
    assert '"count": 8' in result


@pytest.mark.jobs
@pytest.mark.parametrize(("point", "visit", "whole"), POINTS)
def test_a_job_killed_between_its_disks_and_the_runs_directory_loses_nothing_whole(
    point: str, visit: int, whole: int, start: Path, reference: Path, tmp_path: Path
) -> None:
    config, disks = job(start, tmp_path), disks_of(tmp_path)
    with Forked(config, fault=f"{point}:*:{visit}:kill", disks=disks) as running:
        assert -9 in running.wait()
    assert assert_prefix(config.output_dir, reference) in (2, 3, 4)

    with Forked(replace(config, resume=True), disks=disks) as running:
        assert running.wait() == [0, 0], running.output()
        assert whole <= step_after(running) <= 6

    assert_same_end(config.output_dir, reference, step=8)


@pytest.mark.faults
def test_a_machine_that_is_lost_with_its_disk_costs_what_the_directory_lacks(
    start: Path, reference: Path, tmp_path: Path
) -> None:
    config, disks = job(start, tmp_path), disks_of(tmp_path)
    with Forked(config, fault="upload.before_copy:*:4:kill", disks=disks) as running:
        running.wait()
    shutil.rmtree(disks[1])
    disks[1].mkdir()

    with Forked(replace(config, resume=True), disks=disks) as running:
        assert running.wait() == [0, 0], running.output()
        assert step_after(running) == 3

    assert_same_end(config.output_dir, reference, step=8)


@pytest.mark.faults
@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_processes_goes_on_from_what_was_only_on_the_disks(
    world_size: int, start: Path, reference: Path, tmp_path: Path
) -> None:
    """All old parts are on one machine here; who reads them is another process than wrote them."""
    config, disks = job(start, tmp_path), disks_of(tmp_path, 1)
    with Forked(config, fault="upload.before_copy:*:4:kill", disks=disks * 2) as running:
        running.wait()
    assert assert_prefix(config.output_dir, reference) == 3

    again = replace(config, resume=True, max_steps=8)
    with Forked(again, world_size=world_size, disks=disks * world_size) as running:
        assert running.wait() == [0] * world_size, running.output()
        assert step_after(running) >= 4

    assert len(metrics(config.output_dir)) == len(metrics(reference))


@pytest.mark.faults
@pytest.mark.parametrize("step", ["pretrain", "reward", "ppo"])
def test_every_step_goes_on_from_its_machines_disks(step: str, start: Path, tmp_path: Path) -> None:
    config, disks = job(start, tmp_path, step), disks_of(tmp_path)
    whole = replace(config, output_dir=tmp_path / "whole", local_checkpoints=None)
    assert run_forked(whole) == [0, 0]
    with Forked(config, fault="upload.after_file:*:5:kill", disks=disks) as running:
        running.wait()

    with Forked(replace(config, resume=True), disks=disks) as running:
        assert running.wait() == [0, 0], running.output()
        assert step_after(running) >= 5

    assert_same_end(config.output_dir, whole.output_dir, step=8)


@pytest.mark.faults
def test_what_was_only_on_the_disks_is_not_overwritten_unasked(start: Path, tmp_path: Path) -> None:
    config, disks = job(start, tmp_path), disks_of(tmp_path)
    with Forked(config, fault="upload.before_copy:*:1:kill", disks=disks) as running:
        running.wait()
    assert not list(config.output_dir.glob("checkpoints/step_*"))

    with Forked(config, disks=disks) as running:
        running.wait()
        assert "holds the checkpoints of a run that was cut off" in running.output()
