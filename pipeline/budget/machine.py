"""The machine for which a plan is made: processes, devices, host memory, and speed."""

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.system.errors import ConfigError, counted
from pipeline.system.memory import available_bytes

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Machine:
    """One machine of a job; all machines of a job are assumed to be identical."""

    processes: int
    """Maximum number of processes per step on one machine; with GPUs, one per GPU."""

    world: int
    """Number of processes of the step, on all machines."""

    gpu_bytes: int | None
    """Memory per GPU; None if unknown, or if models compute on the CPU."""

    host_bytes: int | None
    """Host memory for all processes; None if unknown."""

    name: str = "this machine"

    has_unknown_gpus: bool = False
    """Whether there are GPUs with unknown memory."""

    @property
    def has_gpu(self) -> bool:
        """Whether models compute on GPUs."""
        return self.gpu_bytes is not None or self.has_unknown_gpus

    @property
    def is_known(self) -> bool:
        """Whether the memory of the compute devices is known."""
        return (self.gpu_bytes if self.has_gpu else self.host_bytes) is not None


def detect_machine(*, processes: int, world: int, gpus: Sequence[str]) -> Machine:
    """Describe this machine in its current state, for a step with this many local processes.

    `gpus` are the GPUs that they use, as named by `pipeline.launch.local.list_gpus`.
    """
    free = free_gpu_bytes(gpus) if gpus else None
    unknown = bool(gpus) and free is None
    return Machine(processes, world, free, available_bytes(), has_unknown_gpus=unknown)


def parse_machine(text: str) -> Machine:
    """Parse a machine such as `8xA100-80GB` or, with host memory, `2x8xH100-80GB+1024GB`.

    Raises:
        ConfigError: the text does not have this form.
    """
    match = re.fullmatch(
        r"(?:(\d+)x)??(\d+)x(?:[A-Za-z]\w*-)?(\d+)-?GB(?:\+(\d+)GB)?", text, re.IGNORECASE
    )
    if match is None:
        raise ConfigError(
            f"--plan-for {text} does not describe a machine; use a form such as 8xA100-80GB,"
            " 4x24GB, 8xA100-80GB+1024GB (with host memory) or 2x8xA100-80GB (two machines)"
        )
    nodes, gpus, size, host = match.groups()
    count = int(gpus)
    if not count or not int(size) or not int(nodes or 1):
        raise ConfigError(
            f"--plan-for {text} has no GPU or no memory; all numbers must be positive"
        )
    host_bytes = int(host) * GIB if host else None
    return Machine(count, count * int(nodes or 1), int(size) * GIB, host_bytes, name=text)


def free_gpu_bytes(gpus: Sequence[str]) -> int | None:
    """Return the smallest free memory of these local GPUs, in bytes, or None if any is unknown.

    The numbers are from nvidia-smi, so that no process initializes the GPUs.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    options = ("--query-gpu=memory.free", "--format=csv,noheader,nounits")
    command = ["nvidia-smi", f"--id={','.join(gpus)}", *options]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = [line.strip() for line in output.splitlines()]
    if len(lines) != len(gpus) or not all(line.isdigit() for line in lines):
        return None
    return min(int(line) * MIB for line in lines)


def format_bytes(*sizes: int) -> tuple[str, ...]:
    """Format sizes in GiB, or in MiB if all are below 1 GiB."""
    unit, name = (GIB, "GiB") if max(sizes) >= GIB else (MIB, "MiB")
    return tuple(f"{size / unit:.1f} {name}" for size in sizes)


def describe_machine(machine: Machine) -> str:
    """Describe the memory of a machine in a sentence."""
    parts: list[str] = []
    if machine.gpu_bytes is not None:
        parts.append(f"{format_bytes(machine.gpu_bytes)[0]} on each GPU")
    elif machine.has_gpu:
        parts.append("GPUs with unknown memory")
    if machine.host_bytes is not None:
        processes = counted(machine.processes, "process")
        parts.append(f"{format_bytes(machine.host_bytes)[0]} of host memory for {processes}")
    return f"{machine.name} has {' and '.join(parts) or 'unknown memory'}"


TFLOPS = {"A100": 312, "A800": 312, "H100": 989, "H200": 989, "H20": 148, "B200": 2250, "L40S": 362}
"""bf16 TFLOP/s on tensor cores without sparsity, from NVIDIA's data sheets."""

MATRIX_SIZE = 512
"""Rows and columns of the matrices whose product is timed."""

MEASURED_SECONDS = 0.2
"""Seconds for which the product is repeated; the fastest repetition counts."""


def data_sheet_flops(name: str) -> tuple[float, str] | None:
    """Return a GPU's peak FLOP/s and its model, as in `TFLOPS`, or None if the name is unknown."""
    for card in sorted(TFLOPS, key=len, reverse=True):
        if re.search(rf"{card}(?!\d)", name, re.IGNORECASE):  # an A1000 is not an A100
            return 1e12 * TFLOPS[card], card
    return None


def measure_flops() -> float:
    """Measure the CPU's operations per second in the fastest of several fp32 matrix products."""
    import torch

    left, right = torch.ones(2, MATRIX_SIZE, MATRIX_SIZE)
    fastest, end = float("inf"), time.perf_counter() + MEASURED_SECONDS
    with torch.no_grad():
        torch.mm(left, right)  # warm up: the first call allocates and starts threads
        while time.perf_counter() < end or fastest == float("inf"):
            start = time.thread_time()  # excludes the time of other programs
            torch.mm(left, right)
            fastest = min(fastest, time.thread_time() - start)
    return 2 * MATRIX_SIZE**3 / fastest
