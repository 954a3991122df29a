"""GPUs and processes of this machine, and environment variables that it passes to others.

Values are passed through pipes and SLURM's environment, never on a command line, which every user
of a machine can read.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from pipeline.system.errors import ConfigError, counted

CPU_PROCESSES = 2
"""Default number of processes on a machine without a GPU."""

FORWARDED = re.compile(
    r"(NCCL|GLOO|UCX|FI|OMP|MKL|KMP|TORCH|PYTORCH|HF|TRANSFORMERS|TOKENIZERS)_\w+"
    r"|(WANDB|TRACKIO)_\w+|PYTHON(?!PATH)\w+|CUDA_(?!VISIBLE_DEVICES)\w+|CUBLAS_WORKSPACE_CONFIG"
    r"|(HTTPS?|NO|ALL)_PROXY|(https?|no|all)_proxy|RLHF_(PLANNED|THREADS|PIPELINE_KERNELS)"
)
"""Environment variables passed to other machines, except devices and paths."""

PLANNED = "RLHF_PLANNED"
"""Environment variable that tells a step that `train.py` has checked its memory."""


def count_processes(requested: int | None, *, option: str = "--num-processes") -> int:
    """Return the number of processes on a node: `requested`, or else one per GPU, or else 2.

    Raises:
        ConfigError: there are more processes than GPUs.
    """
    gpus = len(list_gpus())
    if requested is not None and 0 < gpus < requested:
        raise ConfigError(f"{option} {requested} exceeds this machine's {counted(gpus, 'GPU')}")
    return requested or gpus or CPU_PROCESSES


def list_gpus(*, hidden: bool = False) -> list[str]:
    """Return indices or names of the GPUs that this process may use, or of all if `hidden`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not hidden:
        names = visible.replace(" ", "").split(",")
        # CUDA ignores an invalid entry, such as -1, and all that follow.
        return list(takewhile(re.compile(r"\d|GPU-|MIG-").match, names))
    if shutil.which("nvidia-smi") is None:  # as in some containers
        devices = Path("/dev").glob("nvidia[0-9]*")
        return sorted(device.name.removeprefix("nvidia") for device in devices)
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return [str(number) for number in range(count)]


class Gpu(NamedTuple):
    """One GPU as listed by its driver."""

    name: str
    total_mib: int
    used_mib: int


def query_gpus() -> list[Gpu]:
    """Return the machine's GPUs, visible to this process or not, or [] without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    listing = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, check=False)
    rows = [line.rsplit(",", 2) for line in listing.stdout.splitlines() if line.count(",") >= 2]
    return [
        Gpu(name.strip(), int(total), int(used))
        for name, total, used in rows
        if total.strip().isdigit() and used.strip().isdigit()
    ]


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of this machine that are passed to remote processes."""
    return {name: value for name, value in environment.items() if FORWARDED.fullmatch(name)}
