"""What this machine can run: its GPUs, and that many processes."""

import os
import shutil
import subprocess
from pathlib import Path

from pipeline.errors import ConfigError

CPU_PROCESSES = 2
"""Processes on a machine without a GPU, where no number is given."""


def count_processes(requested: int | None) -> int:
    """Processes of a step on one node: what was asked for, else one per GPU.

    Raises:
        ConfigError: more processes than GPUs.
    """
    gpus = count_gpus()
    if requested is not None and 0 < gpus < requested:
        raise ConfigError(
            f"--num-processes {requested} is more than the {gpus} GPUs of this machine"
        )
    return requested or gpus or CPU_PROCESSES


def count_gpus(*, hidden: bool = False) -> int:
    """GPUs this process may use, or all with the `hidden` ones, without importing torch."""
    return len(list_gpus(hidden=hidden))


def list_gpus(*, hidden: bool = False, devices: Path = Path("/dev")) -> list[str]:
    """Their numbers, or other names where CUDA_VISIBLE_DEVICES has them, in its order."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not hidden:
        return [gpu for each in visible.split(",") if (gpu := each.strip()) not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:  # as in some containers
        return sorted(each.name.removeprefix("nvidia") for each in devices.glob("nvidia[0-9]*"))
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return [str(number) for number in range(count)]


def gpu_names() -> list[str]:
    """What nvidia-smi calls this machine's GPUs; nothing where it is not there."""
    if shutil.which("nvidia-smi") is None:
        return []
    requested = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listing = subprocess.run(requested, capture_output=True, text=True, check=False).stdout
    return [line.strip() for line in listing.splitlines() if line.strip()]


def share_of_cores(processes: int) -> int:
    """Cores for each of that many processes on this machine, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // processes)
