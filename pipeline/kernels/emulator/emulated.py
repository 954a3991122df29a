"""The product's own path from source to launch, with the kernel on the CPU.

Between them stand functions of the names of NVRTC and of the CUDA driver, which compile by g++ and
run under the emulator. For tests and benchmarks; the product imports none of it.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.errors import KernelError
from pipeline.kernels.toolchain.cubins import CubinCache
from pipeline.kernels.toolchain.driver import Driver, LaunchError
from pipeline.kernels.toolchain.gpu import Gpu
from pipeline.kernels.toolchain.nvrtc import Nvrtc

HERE = Path(__file__).parent

SCHEDULES = (0, 1, 7)
"""Threads and blocks in order, in reverse, and shuffled."""


def compiler_found() -> bool:
    """Whether the emulator can be built here."""
    return shutil.which("g++") is not None


def build_emulator(directory: Path) -> Path:
    """Compile the emulator, if it is not there; headers of kernels lie beside it."""
    library = directory / "libemulator.so"
    if library.exists():
        return library
    sources = [str(HERE / name) for name in ("emulator.cpp", "toolkit.cpp")]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(["g++", *flags, *sources, "-o", str(library)], check=True)
    shutil.copy(HERE / "emulator.h", directory)
    return library


class Emulator:
    """The emulated GPU, and what may be asked of it besides."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.library = build_emulator(directory)
        self._functions = ctypes.CDLL(str(self.library))
        self._functions.emulator_allow.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        for name in ("emulator_error", "emulator_last_launch"):
            getattr(self._functions, name).restype = ctypes.c_char_p
        self._functions.emulator_locked_bytes.restype = ctypes.c_size_t
        self.cubins = directory / "cubins"

    def gpu(self, **changes: Any) -> Gpu:  # noqa: ANN401
        """A GPU of compute capability 9.0 with two multiprocessors."""
        settings: dict[str, Any] = {
            "capability": 90,
            "num_multiprocessors": 2,
            "nvrtc": Nvrtc(self.library),
            "driver": Driver(self.library),
            "cubins": CubinCache(self.cubins),
        }
        return Gpu(torch.device("cpu"), **(settings | changes))

    @contextmanager
    def memory(self, *tensors: Tensor | None, schedule: int = 0) -> Iterator[None]:
        """Have kernels touch these tensors, and those made inside, and no other memory.

        Raises:
            AssertionError: the emulator found a fault; with its words.
        """
        self._functions.emulator_forbid()
        self._functions.emulator_schedule(schedule)
        for tensor in tensors:
            if tensor is not None:
                self._allow(tensor)
        try:
            with _Made(self._allow):
                yield
        except (KernelError, LaunchError) as error:
            if "LAUNCH_FAILED" in str(error):
                raise AssertionError(self._functions.emulator_error().decode()) from None
            raise
        finally:
            self._functions.emulator_forbid()

    @contextmanager
    def any_memory(self) -> Iterator[None]:
        """Have kernels touch whatever they like."""
        self._functions.emulator_forbid()
        self._functions.emulator_schedule(0)
        self._functions.emulator_allow(4096, 1 << 47)
        yield
        self._functions.emulator_forbid()

    @property
    def last_launch(self) -> str:
        """Kernel, grid, block, shared memory and stream."""
        return self._functions.emulator_last_launch().decode()

    @property
    def locked_bytes(self) -> int:
        """Bytes of the pages that the driver was asked to lock; it locks a MiB at most."""
        return self._functions.emulator_locked_bytes()

    def _allow(self, tensor: Tensor) -> None:
        if tensor.numel():
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in pairs)
            self._functions.emulator_allow(tensor.data_ptr(), extent * tensor.itemsize)


class _Made(TorchDispatchMode):
    """Tells of every tensor that PyTorch makes."""

    def __init__(self, announce: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.announce = announce

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
                self.announce(leaf)
        return result
