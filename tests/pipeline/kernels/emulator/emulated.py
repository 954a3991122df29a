"""A GPU on the CPU: the kernels' own sources, compiled by g++ and run under the emulator."""

import ctypes
import hashlib
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.kernels.gpu import PRELUDE, SOURCES, Dim, Gpu, Kernel, LaunchError, Macros

HERE = Path(__file__).parent

FLAGS = ("-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fPIC", "-shared")

ENTRY = re.compile(r"__global__ .*?\b(\w+)\((\w+) \w+\) {")


def is_supported() -> bool:
    """Return whether the emulator can be built on this machine."""
    return shutil.which("g++") is not None and platform.machine() in ("x86_64", "AMD64")


class Emulator:
    """The machine that emulated GPUs run on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "libemulator.so"
        self.compile(str(HERE / "emulator.cpp"), "-o", str(self.path))
        (directory / "prelude.cuh").write_text(PRELUDE)
        self.library = ctypes.CDLL(str(self.path))
        self.library.emulator_allow.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.library.emulator_error.restype = ctypes.c_char_p
        self.schedule = 0
        self.last_launch: tuple[str, Dim, Dim, int] | None = None

    def compile(self, *arguments: str) -> None:
        """Run g++."""
        subprocess.run(["g++", *FLAGS, *arguments], check=True, capture_output=True)

    def gpu(self) -> Gpu:
        """Return a GPU of two multiprocessors."""
        return EmulatedGpu(self)

    @contextmanager
    def memory(self, *tensors: Tensor | None, schedule: int = 0) -> Iterator[None]:
        """Let kernels access only these tensors and those created inside."""
        self.schedule = schedule
        for tensor in tensors:
            if tensor is not None:
                self._allow(tensor)
        try:
            with _ReportMode(self._allow):
                yield
        except LaunchError as error:
            raise AssertionError(str(error)) from None
        finally:
            self.library.emulator_forbid()

    def _allow(self, tensor: Tensor) -> None:
        if tensor.numel():
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in pairs)
            self.library.emulator_allow(tensor.data_ptr(), extent * tensor.itemsize)


class EmulatedGpu(Gpu):
    """A GPU whose kernels run on the CPU."""

    def __init__(self, emulator: Emulator) -> None:
        self.device, self.capability, self.num_multiprocessors = torch.device("cpu"), 90, 2
        self._emulator = emulator

    def kernel(self, name: str, entry: str, defines: Macros) -> "EmulatedKernel":
        """Compile a kernel, unless it has been compiled already."""
        source = (SOURCES / f"{name}.cu").read_text()
        # Kernels take one struct by value; functions that take its address are added.
        for kernel, type_name in ENTRY.findall(source):
            source += (
                f'extern "C" void emulated_{kernel}(const void* params)'
                f" {{ {kernel}(*static_cast<const {type_name}*>(params)); }}\n"
            )
        macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
        digest = hashlib.sha256("\0".join([source, *macros]).encode()).hexdigest()[:16]
        library = self._emulator.directory / f"{name}-{digest}.so"
        if not library.exists():
            text = library.with_suffix(".cpp")
            text.write_text(source)
            includes = [f"-I{self._emulator.directory}", f"-I{HERE}", "-w"]
            self._emulator.compile(
                *includes, *macros, str(text), str(self._emulator.path), "-o", str(library)
            )
        function = getattr(ctypes.CDLL(str(library)), f"emulated_{entry}")
        return EmulatedKernel(function, self._emulator, entry)


class EmulatedKernel(Kernel):
    """A kernel that runs on the CPU."""

    def __init__(self, function: object, emulator: Emulator, name: str) -> None:
        self._function, self._emulator, self._name = function, emulator, name

    def __call__(
        self, params: ctypes.Structure, *, grid: Dim, block: Dim, shared_bytes: int = 0
    ) -> None:
        """Run all threads."""
        emulator = self._emulator
        emulator.last_launch = (self._name, grid, block, shared_bytes)
        failed = emulator.library.emulator_launch(
            self._function,
            ctypes.byref(params),
            (ctypes.c_uint * 6)(*grid, *block),
            ctypes.c_size_t(shared_bytes),
            emulator.schedule,
        )
        if failed:
            raise LaunchError(emulator.library.emulator_error().decode())

    def max_active_blocks(self, threads: int, shared_bytes: int) -> int:
        """Return the number of blocks at 255 of 65,536 registers per thread, as on a GPU."""
        del shared_bytes
        return 65536 // (255 * threads)


class _ReportMode(TorchDispatchMode):
    """Reports every tensor that PyTorch creates."""

    def __init__(self, report: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.report = report

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        del types
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.report(leaf)
        return result
