import os
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.launch.local import count_gpus, count_processes, list_gpus, share_of_cores


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


def test_gpus_have_the_names_by_which_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 0,GPU-a1,-1")

    assert list_gpus() == ["2", "0", "GPU-a1"]


def test_without_the_drivers_tool_gpus_are_counted_by_their_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()

    assert list_gpus(devices=tmp_path) == ["0", "1"]


def test_a_node_runs_one_process_per_gpu_or_two_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert (count_processes(None), count_processes(2)) == (3, 2)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (count_processes(None), count_processes(4)) == (2, 4)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    with pytest.raises(ConfigError, match="--num-processes 3 is more than the 2 GPUs"):
        count_processes(3)


def test_hidden_gpus_count_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: a)'\n")
    tool.chmod(0o755)

    assert (count_gpus(), count_gpus(hidden=True)) == (0, 1)


def test_processes_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))

    assert [share_of_cores(n) for n in (1, cores, 10 * cores)] == [cores, 1, 1]
