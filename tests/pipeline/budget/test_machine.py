"""Descriptions of machines, given and detected."""

from pathlib import Path

import pytest

from pipeline.budget.machine import GIB, MIB, Machine, detect_machine, free_gpu_bytes, parse_machine
from pipeline.system.memory import available_bytes


@pytest.mark.parametrize(
    ("text", "processes", "world", "gpu", "host"),
    [
        ("8xH100-80GB", 8, 8, 80 * GIB, None),
        ("2x8xA100-80GB+1024GB", 8, 16, 80 * GIB, 1024 * GIB),
        ("4x24-gb+64GB", 4, 4, 24 * GIB, 64 * GIB),
    ],
)
def test_machine_description_is_parsed(
    text: str, processes: int, world: int, gpu: int, host: int | None
) -> None:
    assert parse_machine(text) == Machine(processes, world, gpu, host, name=text)


def test_available_memory_respects_the_cgroup_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 200000\nfile 400000\n")

    assert available_bytes([tmp_path]) == 1000000 - 700000 + 200000


def install_fake_nvidia_smi(directory: Path, monkeypatch: pytest.MonkeyPatch, *free: str) -> None:
    """Install a tool that reports the free memory, in MiB, of the requested GPUs."""
    tool = directory / "nvidia-smi"
    cases = "\n".join(f"{number}) echo '{mebibytes}';;" for number, mebibytes in enumerate(free))
    for_each = f'for id in $requested; do case "$id" in\n{cases}\nesac; done\n'
    tool.write_text(f"#!/bin/sh\nrequested=${{1#--id=}}\nIFS=,\n{for_each}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))


def test_gpu_memory_is_that_of_the_fullest_used_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_nvidia_smi(tmp_path, monkeypatch, "80000", "100", "70000")

    assert free_gpu_bytes(["0", "2"]) == 70000 * MIB
    assert free_gpu_bytes(["1"]) == 100 * MIB
    machine = detect_machine(processes=2, world=2, gpus=["2", "0"])
    assert (machine.gpu_bytes, machine.is_known) == (70000 * MIB, True)
