"""Every kernel compiles for every GPU that the compiler here knows, without spilling registers."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.kernels.operators import cases_of, operators
from pipeline.kernels.toolchain.gpu import HEADERS, OLDEST, OPERATORS, OPTIONS, Macros
from pipeline.kernels.toolchain.nvrtc import Nvrtc

REGISTERS = 255
"""Of a thread, as many as there are."""


ALL = [
    (name, defines) for name in operators(on_gpu=True) for defines in cases_of(name).SPECIALISATIONS
]
FEW = [
    (name, defines)
    for name in operators(on_gpu=True)
    for defines in cases_of(name).SPECIALISATIONS[:: len(cases_of(name).SPECIALISATIONS) - 1 or 1]
]
"""The first and the last of each operator."""


class Compiler:
    """NVRTC where a CUDA build of PyTorch or its package is installed, else nvcc."""

    def __init__(self) -> None:
        found = (
            path
            for place in sys.path
            for path in sorted(Path(place).glob("nvidia/*/lib/libnvrtc.so.*"))
        )
        path = next(found, None)
        self.nvrtc = Nvrtc(path.resolve()) if path else None
        self.nvcc = shutil.which("nvcc")

    @property
    def architectures(self) -> list[int]:
        if self.nvrtc is not None:
            return [each for each in self.nvrtc.architectures if each >= OLDEST]
        if self.nvcc is None:
            pytest.skip("there is no compiler of CUDA here")
        listed = subprocess.run(
            [self.nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True
        )
        return sorted({int(number) for number in re.findall(r"sm_(\d+)\b", listed.stdout)})

    def log(self, name: str, defines: Macros, architecture: int, directory: Path) -> str:
        """What the compiler tells of registers and spills."""
        source = OPERATORS / name / "cuda.cu"
        macros = [f"-D{macro}={value}" for macro, value in defines.items()]
        if self.nvrtc is not None:
            options = [f"--gpu-architecture=sm_{architecture}", *OPTIONS, *macros]
            _, log = self.nvrtc.compile(
                source.read_text(),
                name=name,
                headers=HEADERS,
                options=[*options, "--ptxas-options=-v"],
            )
            return log
        assert self.nvcc is not None
        command = [self.nvcc, "-cubin", f"-arch=sm_{architecture}", "-Xptxas=-v", *OPTIONS, *macros]
        command += [f"-I{OPERATORS / 'include'}", str(source), "-o", str(directory / "cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler()


def check(compiler: Compiler, name: str, defines: Macros, architecture: int, path: Path) -> None:
    log = compiler.log(name, defines, architecture, path)

    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    assert spilled, log
    assert all(each == ("0", "0") for each in spilled), (architecture, defines, log)
    assert all(int(number) <= REGISTERS for number in re.findall(r"Used (\d+) registers", log))


def oldest_and_newest(known: list[int]) -> Iterator[int]:
    yield known[0]
    if 90 in known:
        yield 90
    yield known[-1]


@pytest.mark.jobs
@pytest.mark.parametrize(("name", "defines"), FEW, ids=[name for name, _ in FEW])
def test_a_kernel_compiles_for_old_and_new_gpus_without_spills(
    name: str, defines: Macros, compiler: Compiler, tmp_path: Path
) -> None:
    for architecture in oldest_and_newest(compiler.architectures):
        check(compiler, name, defines, architecture, tmp_path)


@pytest.mark.grid
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_for_every_gpu_without_spills(
    compiler: Compiler, tmp_path: Path
) -> None:
    def compile_all(architecture: int) -> None:
        directory = tmp_path / str(architecture)
        directory.mkdir()
        for name, defines in ALL:
            check(compiler, name, defines, architecture, directory)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_all, compiler.architectures))
