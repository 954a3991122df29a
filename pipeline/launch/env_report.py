"""What this machine is, for a report of a problem: `python -m pipeline.launch.env_report`.

PyTorch's own report, followed by this project's packages, code, kernels and variables. Values of
variables that look like secrets are not shown.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from torch.utils import collect_env

from pipeline import __version__
from pipeline.cli import run_main, say
from pipeline.errors import require
from pipeline.launch.local import PASSED_ON
from pipeline.launch.probe import PACKAGES, ROOT, code_hash, package_version

MORE_PACKAGES = ("accelerate", "pydantic", "triton", "wandb", "tensorboard")
OF_A_JOB = re.compile(r"SLURM_\w+|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_\w+|CUDA_VISIBLE_DEVICES")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|PROXY", re.IGNORECASE)


def report() -> dict[str, str]:
    """Values by name."""
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    return {
        "version": __version__,
        "code": f"{code_hash()[:16]} at {ROOT}",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} available",
        "disk here": f"{disk.total / 2**30:.0f} GiB, {disk.free / 2**30:.0f} free",
        **{name: package_version(name) for name in (*PACKAGES, *MORE_PACKAGES)},
        **shown_variables(os.environ),
    }


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to a job, secrets without their values."""
    return {
        name: "(set, not shown)" if SECRET.search(name) else value
        for name, value in sorted(environment.items())
        if PASSED_ON.fullmatch(name) or OF_A_JOB.fullmatch(name)
    }


def main(argv: Sequence[str]) -> None:
    """Print the report."""
    require(not argv, f"env_report takes no options, got {' '.join(argv)}")
    say(collect_env.get_pretty_env_info())
    say("")
    for name, value in report().items():
        say(f"{name}: {value}")


if __name__ == "__main__":
    run_main(main)
