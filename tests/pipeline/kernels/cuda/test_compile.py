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
import torch

from pipeline.kernels.cuda import adam, append, decode, sample
from pipeline.kernels.cuda.gpu import OLDEST, OPTIONS, PRELUDE, SOURCES
from pipeline.kernels.cuda.nvrtc import Nvrtc

Defines = dict[str, str | int]

REGISTERS = 255
"""Of a thread, as many as there are."""


def attention(dtype: torch.dtype, size: int, heads: int) -> tuple[str, Defines]:
    shape = decode.Shape(heads, size, dtype.itemsize)
    return "decode_attention", decode.specialisation(dtype, shape)


FEW: list[tuple[str, Defines]] = [
    attention(torch.bfloat16, 128, 8),
    attention(torch.float16, 80, 1),
    ("adamw", adam.specialisation((torch.bfloat16, torch.float32, torch.bfloat16, False))),
    ("append", append.SPECIALISATION),
    ("sample", sample.specialisation(torch.bfloat16)),
]
ALL: list[tuple[str, Defines]] = [
    *(
        attention(dtype, size, heads)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for size in decode.HEAD_SIZES
        for heads in (1, 4, 7, 8)
    ),
    *(
        ("adamw", adam.specialisation((gradient, moments, copy, split)))
        for gradient in (torch.float32, torch.bfloat16, torch.float16)
        for moments in (torch.float32, torch.bfloat16)
        for copy, split in [(None, False), (torch.bfloat16, False), (None, True)]
    ),
    ("append", append.SPECIALISATION),
    *(
        ("sample", sample.specialisation(dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
]


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

    def log(self, name: str, defines: Defines, architecture: int, directory: Path) -> str:
        """What the compiler tells of registers and spills."""
        macros = [f"-D{macro}={value}" for macro, value in defines.items()]
        if self.nvrtc is not None:
            options = [f"--gpu-architecture=sm_{architecture}", *OPTIONS, *macros]
            source, prelude = ((SOURCES / file).read_text() for file in (f"{name}.cu", PRELUDE))
            _, log = self.nvrtc.compile(
                source,
                name=name,
                headers={PRELUDE: prelude},
                options=[*options, "--ptxas-options=-v"],
            )
            return log
        assert self.nvcc is not None
        command = [self.nvcc, "-cubin", f"-arch=sm_{architecture}", "-Xptxas=-v", *OPTIONS, *macros]
        command += [str(SOURCES / f"{name}.cu"), "-o", str(directory / "cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler()


def check(compiler: Compiler, name: str, defines: Defines, architecture: int, path: Path) -> None:
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


@pytest.mark.parametrize(("name", "defines"), FEW, ids=[name for name, _ in FEW])
def test_a_kernel_compiles_for_old_and_new_gpus_without_spills(
    name: str, defines: Defines, compiler: Compiler, tmp_path: Path
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
