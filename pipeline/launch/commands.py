"""The processes of a step: how many, with which command and environment."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent

CPU_PROCESSES = 2
"""Processes of single_node on a machine without a GPU."""


def count_processes(asked: int | None) -> int:
    """Processes of a step on one node: what was asked for, else one per GPU.

    Raises:
        ConfigError: more processes than GPUs.
    """
    gpus = count_gpus()
    if asked is not None and 0 < gpus < asked:
        raise ConfigError(f"--num-processes {asked} is more than the {gpus} GPUs of this machine")
    return asked or gpus or CPU_PROCESSES


def count_gpus() -> int:
    """GPUs this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def step_command(module: str, config_file: Path, processes: int | None) -> list[str]:
    """The command line that runs a step, through torchrun unless `processes` is None."""
    step = ["-m", module, "--config", str(config_file)]
    if processes is None:
        return [sys.executable, *step]
    launcher = [sys.executable, "-m", "pipeline.launch.torchrun"]
    return [*launcher, "--standalone", "--nproc-per-node", str(processes), *step]


def step_environment(processes: int | None) -> Mapping[str, str]:
    """This process's environment, so that children find the packages and share the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    threads = str(max(1, (cores or 1) // (processes or 1)))
    return {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path}
