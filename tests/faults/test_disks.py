"""Disk failures: a failed save loses only that checkpoint, failed offloading ends the job."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import StepConfig
from pipeline.config.model import OffloadConfig, ZeroConfig
from tests.faults.jobs import (
    PEER_SECONDS,
    Forked,
    assert_prefix,
    assert_same_end,
    run_forked,
    small_job,
)
from tests.test_resume import read_metrics

STEPS = 8
"""Steps of `reference`."""


def saved_steps(out: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step_*"))


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("action", "reason"),
    [
        pytest.param("enospc", "No space left on device", marks=pytest.mark.faults),
        ("eio", "Input/output error"),
    ],
)
def test_save_error_on_one_rank_is_reported_and_retried(
    action: str, reason: str, inputs: Path, reference: Path, tmp_path: Path
) -> None:
    config = small_job(inputs, "sft", output_dir=tmp_path, max_steps=STEPS)

    # The first file has the frozen weights, the second the checkpoint of step 1.
    with Forked(config, fault=f"checkpoint.mid_file:1:4:{action}") as job:
        assert job.wait() == [0, 0], job.output()
        output = job.output()

    (message,) = [line for line in output.splitlines() if "failed" in line]
    assert f"saving step 3 to {tmp_path}/checkpoints failed: rank 1: {reason}" in message
    assert message.endswith("training continues, and the next save will retry")
    assert saved_steps(tmp_path) == [1, 2, 4, 5, 6, 7, 8]
    assert_same_end(tmp_path, reference, step=STEPS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An output directory whose checkpoints are on a disk of 900 kB."""
    root = tmp_path / "out" / "checkpoints"
    root.mkdir(parents=True)
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(root)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can't be mounted here")
    yield root.parent
    subprocess.run(["umount", "--lazy", str(root)], check=True)


def remount(out: Path, options: str) -> None:
    """Remount the disk when no file is being written, as the system requires."""
    command = ["mount", "-o", f"remount,{options}", str(out / "checkpoints")]
    deadline = time.monotonic() + 20
    while subprocess.run(command, capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline


@pytest.mark.jobs
def test_job_survives_a_full_disk(inputs: Path, reference: Path, small_disk: Path) -> None:
    config = small_job(inputs, "sft", output_dir=small_disk, max_steps=STEPS)

    with Forked(config) as job:
        assert job.wait() == [0, 0], job.output()
        output = job.output()

    failures = [line for line in output.splitlines() if "No space left on device" in line]
    steps = saved_steps(small_disk)
    assert 1 <= len(steps) < STEPS
    assert len(failures) == STEPS - len(steps)  # one message each
    reported = re.findall(r"saved the state after step (\d+) in", output)
    assert [int(step) for step in reported] == steps  # no messages about the others
    assert "saving the state" not in output
    assert read_metrics(small_disk) == read_metrics(reference)
    assert assert_prefix(small_disk, reference) == steps[-1]

    remount(small_disk, "size=50m")
    assert run_forked(replace(config, resume=True)) == [0, 0]
    assert_same_end(small_disk, reference, step=STEPS)


def offload_config(inputs: Path, out: Path, scratch: Path) -> StepConfig:
    config = small_job(inputs, "sft", output_dir=out, max_steps=STEPS)
    offload = OffloadConfig(optimizer="nvme", params="nvme", nvme_path=scratch)
    return replace(config, model=replace(config.model, zero=ZeroConfig(offload=offload)))


@pytest.mark.jobs
@pytest.mark.parametrize("verb", ["read", pytest.param("write", marks=pytest.mark.faults)])
def test_failing_offload_disk_of_one_rank_ends_the_job(
    verb: str, inputs: Path, reference: Path, tmp_path: Path
) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    config = offload_config(inputs, out, scratch)

    with Forked(config, fault=f"offload.{verb}:1:40:eio") as job:
        job.processes[1].join(60)
        codes = job.wait(PEER_SECONDS)
        output = job.output()

    assert codes[1] == 2
    assert codes[0] != 0
    phrase = {"read": "read from", "write": "written to"}[verb]
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"can't be {phrase} the offload file of rank 1 in {scratch}: Input/output" in output
    assert assert_prefix(out, reference) < STEPS
    assert run_forked(replace(config, resume=True)) == [0, 0]
    assert_same_end(out, reference, step=STEPS)
