"""Compile CUDA kernels with NVRTC, which CUDA builds of PyTorch include, and launch them.

NVIDIA's Python bindings, `cuda.bindings`, are required; nvcc and CUDA headers are not.
"""

import ctypes
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from pipeline.kernels.build import atomic_file, cache_directory
from pipeline.system.errors import KernelError

SOURCES = Path(__file__).parent
"""Folder with the CUDA sources, one file for each operator."""

PRELUDE = (SOURCES / "include" / "prelude.cuh").read_text()
"""Header that all sources include."""

OPTIONS = ("-std=c++17", "--fmad=false")
"""Compiler options that round each product and sum separately, unless a kernel calls fmaf."""

MIN_CAPABILITY = 70
"""The lowest supported compute capability, 7.0."""

LOG_LINES = 5
"""Maximum number of lines of the compiler's log in an error message."""

DTYPES = {torch.float32: "float", torch.bfloat16: "Bf16", torch.float16: "F16"}
"""Names of dtypes in sources."""

Macros = Mapping[str, str | int]
"""Macros of a source, which select a specialization."""

Dim = tuple[int, int, int]


class LaunchError(RuntimeError):
    """A kernel could not be launched."""


class Kernel:
    """A kernel on one GPU."""

    def __init__(self, function: Any, device: torch.device, name: str) -> None:  # noqa: ANN401
        self._function, self._device, self._name = function, device, name

    def __call__(
        self, params: ctypes.Structure, *, grid: Dim, block: Dim, shared_bytes: int = 0
    ) -> None:
        """Launch the kernel on the current stream, passing the struct `params` by value.

        Raises:
            torch.OutOfMemoryError: the GPU is out of memory.
            LaunchError: the driver rejects the launch, or an earlier kernel has failed.
        """
        driver = _bindings("driver")
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream().cuda_stream
            (code,) = driver.cuLaunchKernel(
                self._function, *grid, *block, shared_bytes, stream, ctypes.addressof(arguments), 0
            )
        if code == driver.CUresult.CUDA_SUCCESS:
            return
        message = (
            f"the kernel {self._name} can't be launched with grid {grid}, block {block} and"
            f" {shared_bytes} bytes of shared memory: {code.name}"
        )
        if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(message)
        hint = "set CUDA_LAUNCH_BLOCKING=1 to see whether an earlier kernel failed"
        raise LaunchError(f"{message}; {hint}")

    def max_active_blocks(self, threads: int, shared_bytes: int) -> int:
        """Return the occupancy: the maximum number of blocks that a multiprocessor runs at once."""
        occupancy = _bindings("driver").cuOccupancyMaxActiveBlocksPerMultiprocessor
        return max(1, _check(occupancy(self._function, threads, shared_bytes)))


class Gpu:
    """One GPU and its kernels, which are compiled on first use."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.device = device
        self.capability = 10 * properties.major + properties.minor
        """Compute capability, such as 90 for 9.0."""
        self.num_multiprocessors = properties.multi_processor_count
        self._kernels: dict[tuple[str, str, frozenset[tuple[str, str | int]]], Kernel] = {}

    def kernel(self, name: str, entry: str, defines: Macros) -> Kernel:
        """Return the kernel `entry` of an operator's source, compiled with these macros and loaded.

        Raises:
            KernelError: the kernel can't be compiled or loaded.
        """
        key = (name, entry, frozenset(defines.items()))
        if key not in self._kernels:
            self._kernels[key] = self._load(name, entry, defines)
        return self._kernels[key]

    def _load(self, name: str, entry: str, defines: Macros) -> Kernel:
        driver = _bindings("driver")
        image = self._get_cubin(name, defines)
        with torch.cuda.device(self.device):
            torch.cuda.mem_get_info(self.device)  # makes the CUDA context current in this thread
            try:
                library = _check(driver.cuLibraryLoadData(image, [], [], 0, [], [], 0))
                kernel = _check(driver.cuLibraryGetKernel(library, entry.encode()))
                # Load the code now: a failure at the first launch would be fatal.
                function = _check(driver.cuKernelGetFunction(kernel))
            except KernelError as error:
                raise KernelError(f"{name} can't be loaded onto {self.device}: {error}") from None
        return Kernel(function, self.device, entry)

    def _get_cubin(self, name: str, defines: Macros) -> bytes:
        """Return the compiled code of a source, from the cache if possible."""
        path = self._cache_path(name, defines)
        if path is not None and path.exists():
            return path.read_bytes()
        image, _ = compile_source(
            (SOURCES / f"{name}.cu").read_text(), name, self._options(defines)
        )
        if path is not None:
            with suppress(OSError), atomic_file(path) as temporary:
                temporary.write_bytes(image)
        return image

    def _options(self, defines: Macros) -> list[str]:
        macros = [f"-D{macro}={value}" for macro, value in sorted(defines.items())]
        return [f"--gpu-architecture={architecture(self.capability)}", *OPTIONS, *macros]

    def _cache_path(self, name: str, defines: Macros) -> Path | None:
        directory = cache_directory()
        if directory is None:
            return None
        source = (SOURCES / f"{name}.cu").read_text()
        version = ".".join(map(str, nvrtc_version()))
        inputs = [source, PRELUDE, *self._options(defines), version]
        digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()
        return directory / f"{name}-{digest[:16]}.cubin"


def compile_source(source: str, name: str, options: list[str]) -> tuple[bytes, str]:
    """Compile to a cubin, or to PTX for a virtual architecture; return it and the compiler's log.

    Raises:
        KernelError: NVRTC can't be loaded, or rejects the source or an option.
    """
    nvrtc = _nvrtc()
    header = ([PRELUDE.encode()], [b"prelude.cuh"])
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 1, *header))
    try:
        encoded = [option.encode() for option in options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.rstrip(b"\0").decode(errors="replace").strip()
        if code:
            lines = "\n".join((text or code.name).splitlines()[:LOG_LINES])
            raise KernelError(f"{name} can't be compiled with {' '.join(options)}: {lines}")
        kind = "PTX" if any("=compute_" in option for option in options) else "CUBIN"
        image = b" " * _check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program))
        _check(getattr(nvrtc, f"nvrtcGet{kind}")(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return image, text


def architecture(capability: int) -> str:
    """Return the target to compile for: `sm_*`, or PTX (`compute_*`) for GPUs newer than NVRTC.

    Raises:
        KernelError: the GPU is too old for the compiler.
    """
    supported = [number for number in supported_capabilities() if number >= MIN_CAPABILITY]
    if capability in supported:
        return f"sm_{capability}"
    older = [number for number in supported if number < capability]
    if not older:
        raise KernelError(
            f"this GPU has compute capability {capability / 10}, but NVRTC {nvrtc_version()[0]}"
            f" compiles kernels only for {supported[0] / 10} and later"
        )
    return f"compute_{older[-1]}"


@cache
def supported_capabilities() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC supports, such as 90 for 9.0, sorted."""
    return tuple(sorted(_check(_nvrtc().nvrtcGetSupportedArchs())))


@cache
def nvrtc_version() -> tuple[int, int]:
    """Return the major and minor version of NVRTC."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return major, minor


@cache
def _nvrtc() -> Any:  # noqa: ANN401
    try:
        nvrtc = _bindings("nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise KernelError(
            f"NVRTC can't be loaded ({error}); install the packages cuda-bindings and"
            " nvidia-cuda-nvrtc for PyTorch's CUDA version"
        ) from None
    return nvrtc


@cache
def _bindings(module: str) -> Any:  # noqa: ANN401
    return import_module(f"cuda.bindings.{module}")


def _check(result: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Return the value that follows the error code in the result of a function of the bindings."""
    code, *values = result
    if code:
        raise KernelError(code.name)
    return values[0] if values else None


@cache
def get_gpu(device: torch.device) -> Gpu:
    """Return the GPU of a PyTorch device that has an index.

    Raises:
        KernelError: this PyTorch is a build without CUDA.
    """
    if torch.version.cuda is None:
        raise KernelError(f"this PyTorch ({torch.__version__}) is a build without CUDA")
    return Gpu(device)
