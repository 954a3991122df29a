"""What this machine is, for a report of a problem: `python -m pipeline.launch.env_report [--json]`.

Values of variables that look like secrets are not shown.
"""

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil
import torch

from pipeline import __version__
from pipeline.cli import run_main, say
from pipeline.errors import KernelError, require
from pipeline.kernels.toolchain.cpp import (
    NotBuiltError,
    cache_directory,
    compilers,
    instruction_flags,
    version_of,
)
from pipeline.kernels.toolchain.nvrtc import find_nvrtc
from pipeline.launch.environment import PASSED_ON
from pipeline.launch.probe import PACKAGES, ROOT, code_hash, gpus

MORE_PACKAGES = ("accelerate", "jsonargparse", "triton", "wandb", "tensorboard")
TOOLS = {"gcc": "--version", "g++": "--version", "nvcc": "--version", "ninja": "--version"}
OF_A_JOB = re.compile(r"SLURM_\w+|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_\w+|CUDA_VISIBLE_DEVICES")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|PROXY", re.IGNORECASE)

COPY_BYTES = 2**27
"""Of one copy by which bandwidth is measured; more than caches hold."""

COPIES = 4

Section = dict[str, str]


def report() -> dict[str, Section]:
    """What is known of this machine: by section, values by name."""
    sections: Mapping[str, Callable[[], Section]] = {
        "code": _code,
        "packages": _packages,
        "machine": _machine,
        "GPUs": _gpus,
        "kernels": _kernels,
        "network": _network,
        "tools": _tools,
        "bandwidth": _bandwidth,
        "variables": lambda: shown_variables(os.environ),
    }
    return {name: section() for name, section in sections.items()}


def shown_variables(environment: Mapping[str, str]) -> Section:
    """The variables that matter to a job, secrets without their values."""
    return {
        name: "(set, not shown)" if SECRET.search(name) else value
        for name, value in sorted(environment.items())
        if PASSED_ON.fullmatch(name) or OF_A_JOB.fullmatch(name)
    }


def main(argv: Sequence[str]) -> None:
    """Print the report."""
    require(
        list(argv) in ([], ["--json"]),
        f"env_report takes nothing but --json, got {' '.join(argv)}",
    )
    found = report()
    if argv:
        say(json.dumps(found, indent=2))
        return
    width = max(len(name) for section in found.values() for name in section)
    for title, section in found.items():
        say(f"\n{title}")
        for name, value in section.items():
            first, *more = value.splitlines() or [""]
            say("\n".join([f"  {name:<{width}}  {first}", *(f"    {line}" for line in more)]))


def _code() -> Section:
    commit = _output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = _output_of("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return {
        "version": __version__,
        "commit": (commit or "not a git checkout") + (", changed" if commit and changed else ""),
        "hash": code_hash()[:16],
        "path": str(ROOT),
    }


def _packages() -> Section:
    found = {"python": f"{platform.python_version()} ({sys.executable})"}
    for name in (*PACKAGES, *MORE_PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _machine() -> Section:
    cores = psutil.cpu_count(logical=False)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    shared = Path("/dev/shm")
    found = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": f"{cores} cores, {os.cpu_count()} threads, {allowed} of them allowed here",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} available",
        "disk here": f"{disk.total / 2**30:.0f} GiB, {disk.free / 2**30:.0f} free",
        "locked memory": _limit(resource.RLIMIT_MEMLOCK),
        "open files": _limit(resource.RLIMIT_NOFILE),
    }
    if shared.is_dir():
        found["/dev/shm"] = f"{shutil.disk_usage(shared).total / 2**30:.1f} GiB"
    return found


def _gpus() -> Section:
    found = {
        "torch sees": f"{torch.cuda.device_count()} (built for CUDA {torch.version.cuda})",
        "driver lists": str(len(gpus())),
    }
    for number in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(number)
        free, _ = torch.cuda.mem_get_info(number)
        found[f"GPU {number}"] = (
            f"{each.name}, {each.total_memory / 2**30:.0f} GiB, {free / 2**30:.0f} free, compute"
            f" capability {each.major}.{each.minor}, {each.multi_processor_count} processors"
        )
    if torch.cuda.is_available():
        from torch.cuda import nccl

        found["NCCL"] = ".".join(str(part) for part in nccl.version())
        found["links"] = "\n" + (_output_of("nvidia-smi", "topo", "-m") or "unknown")
    return found


def _kernels() -> Section:
    """What compiles this repository's kernels here, or why PyTorch does their work."""
    try:
        on_cpus = f"{version_of(tuple(compilers()[0]))}, {' '.join(instruction_flags())}"
    except NotBuiltError as reason:
        on_cpus = f"none: {reason}"
    try:
        find_nvrtc()
        on_gpus = "NVRTC of PyTorch" if torch.cuda.is_available() else "none: there is no GPU"
    except KernelError as reason:
        on_gpus = f"none: {reason}"
    return {"on CPUs": on_cpus, "on GPUs": on_gpus, "kept in": str(cache_directory())}


def _network() -> Section:
    found = {"name": platform.node()}
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        shown = [each.address for each in addresses if each.family.name in ("AF_INET", "AF_INET6")]
        if shown and stats[name].isup:
            speed = f", {stats[name].speed} Mb/s" if stats[name].speed > 0 else ""
            found[name] = ", ".join(shown) + speed
    found["backends"] = ", ".join(
        name
        for name in ("gloo", "nccl", "mpi")
        if getattr(torch.distributed, f"is_{name}_available")()
    )
    return found


def _tools() -> Section:
    lines = {name: _output_of(name, option).splitlines() for name, option in TOOLS.items()}
    return {name: output[-1 if name == "nvcc" else 0] for name, output in lines.items() if output}


def _bandwidth() -> Section:
    source, sink = (torch.ones(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    found = {"main memory": _speed(lambda: sink.copy_(source), lambda: None)}
    if torch.cuda.is_available():
        wait = torch.cuda.synchronize
        device = source.cuda()
        pinned = source.pin_memory()
        found["to the GPU"] = _speed(lambda: device.copy_(pinned, non_blocking=True), wait)
        found["from the GPU"] = _speed(lambda: pinned.copy_(device, non_blocking=True), wait)
        other = device.clone()
        found["GPU memory"] = _speed(lambda: other.copy_(device), wait)
    return found


def _speed(copy: Callable[[], object], wait: Callable[[], object]) -> str:
    """The speed of the fastest of a few copies."""
    times: list[float] = []
    for _ in range(COPIES):
        wait()
        began = time.perf_counter()
        copy()
        wait()
        times.append(time.perf_counter() - began)
    return f"copies {COPY_BYTES / min(times) / 1e9:.1f} GB/s"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", info.read_text()) if info.is_file() else []
    return names[0] if names else platform.processor() or platform.machine()


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def _output_of(*command: str) -> str:
    """What a command prints; nothing where it isn't there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else ""


if __name__ == "__main__":
    run_main(main)
