import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.launch.commands import count_gpus, count_processes, step_command, step_environment


@pytest.mark.parametrize(("visible", "gpus"), [("", 0), ("-1", 0), ("0", 1), ("0,3", 2)])
def test_visible_devices_are_counted(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpus: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert count_gpus() == gpus


def test_gpus_are_counted_as_the_driver_lists_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: a)'\necho 'GPU 1: H200 (UUID: b)'\n")
    tool.chmod(0o755)

    assert count_gpus() == 2


def test_a_node_runs_one_process_per_gpu_or_two_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert (count_processes(None), count_processes(2)) == (3, 2)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (count_processes(None), count_processes(4)) == (2, 4)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    with pytest.raises(ConfigError, match="--num-processes 3 is more than the 2 GPUs"):
        count_processes(3)


def test_a_step_runs_with_or_without_torchrun() -> None:
    step = ["-m", "step1_sft.train", "--config", "out/config.yaml"]
    one = step_command("step1_sft.train", Path("out/config.yaml"), None)
    two = step_command("step1_sft.train", Path("out/config.yaml"), 2)

    assert one == [sys.executable, *step]
    assert two[-4:] == step
    assert two[:3] == [sys.executable, "-m", "pipeline.launch.torchrun"]


def test_children_find_the_packages_from_any_directory(tmp_path: Path) -> None:
    import_it = [sys.executable, "-c", "import pipeline.errors, step1_sft.config"]

    subprocess.run(import_it, cwd=tmp_path, env=dict(step_environment(None)), check=True)


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert step_environment(None)["OMP_NUM_THREADS"] == str(cores)
    assert step_environment(cores)["OMP_NUM_THREADS"] == "1"
    assert step_environment(10 * cores)["OMP_NUM_THREADS"] == "1"

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert step_environment(2)["OMP_NUM_THREADS"] == "7"
