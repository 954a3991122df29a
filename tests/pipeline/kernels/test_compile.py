"""Kernels compile for old and new GPUs without spilling registers."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.kernels import gpu
from pipeline.kernels.gpu import MIN_CAPABILITY, OPTIONS, SOURCES, Macros
from pipeline.system.errors import KernelError
from tests.pipeline.kernels.test_cases import CASES

ALL = [(name, defines) for name, cases in CASES.items() for defines in cases.SPECIALIZATIONS]
FEW = [
    (name, cases.SPECIALIZATIONS[0 if name == "sampling" else -1]) for name, cases in CASES.items()
]
"""The last of each operator, but the first of sampling, which compiles faster."""


def capabilities() -> list[int]:
    """Return the compute capabilities that NVRTC, or else nvcc, supports."""
    try:
        return [number for number in gpu.supported_capabilities() if number >= MIN_CAPABILITY]
    except KernelError:
        if shutil.which("nvcc") is None:
            pytest.skip("there is no CUDA compiler here")
        command = ["nvcc", "--list-gpu-code"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return sorted({int(number) for number in re.findall(r"sm_(\d+)\b", result.stdout)})


def compile_log(name: str, defines: Macros, capability: int, directory: Path) -> str:
    macros = [f"-D{macro}={value}" for macro, value in defines.items()]
    options = [*OPTIONS, *macros, "--ptxas-options=-v"]
    source = SOURCES / f"{name}.cu"
    try:
        target = f"--gpu-architecture=sm_{capability}"
        return gpu.compile_source(source.read_text(), name, [target, *options])[1]
    except KernelError:
        if shutil.which("nvcc") is None:
            raise
    command = ["nvcc", "-cubin", f"-arch=sm_{capability}", *options]
    command += [f"-I{SOURCES / 'include'}", str(source), "-o", str(directory / "cubin")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


def check(name: str, defines: Macros, capability: int, directory: Path) -> None:
    log = compile_log(name, defines, capability, directory)
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    assert spilled, log
    assert all(sizes == ("0", "0") for sizes in spilled), (capability, defines, log)


@pytest.mark.jobs
@pytest.mark.parametrize(("name", "defines"), FEW, ids=[name for name, _ in FEW])
def test_kernel_compiles_for_old_and_new_gpus(name: str, defines: Macros, tmp_path: Path) -> None:
    supported = capabilities()
    for capability in {supported[0], 90 if 90 in supported else supported[-1]}:
        check(name, defines, capability, tmp_path)


@pytest.mark.grid
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_for_every_gpu(tmp_path: Path) -> None:
    for capability in capabilities():
        for name, defines in ALL:
            check(name, defines, capability, tmp_path)
