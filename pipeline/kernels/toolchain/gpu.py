"""What compiles kernels for one GPU and starts them there."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from pipeline.errors import KernelError
from pipeline.kernels.toolchain.cache import cache_directory
from pipeline.kernels.toolchain.cubins import CubinCache
from pipeline.kernels.toolchain.driver import Dim, Driver, DriverError
from pipeline.kernels.toolchain.nvrtc import CompileError, Nvrtc, find_nvrtc

OPERATORS = Path(__file__).parents[1]
"""Folders of the operators; the source of one's kernels is its `cuda.cu`."""

HEADERS = {
    name: (OPERATORS / "include" / name).read_text() for name in ("prelude.cuh", "eight_bits.h")
}
"""What sources may include, by name."""

OPTIONS = ("-std=c++17", "--fmad=false")
"""Products and sums are rounded each unless a kernel asks for fmaf: as on the CPU, bit for bit."""

OLDEST = 70
"""Compute capability, 7.0, that the kernels are written for at least."""

LOG_LINES = 5
"""Of the compiler's words, in an error."""

MENDS = {
    2: "; leave the GPU more free memory",
    209: "; take a PyTorch whose CUDA knows this GPU",
    222: "; install a newer driver, or a PyTorch for the CUDA that this driver has",
}
"""By code of the driver: no memory, no code for this GPU, PTX newer than the driver."""

DTYPES = {torch.float32: "float", torch.bfloat16: "Bf16", torch.float16: "F16"}
"""What a kernel calls a dtype of PyTorch."""

NUMBERS = {name: dtype for dtype, name in DTYPES.items()}
"""PyTorch's dtypes, by what a kernel calls them."""

Macros = Mapping[str, str | int]
"""What chooses a specialisation of a source at compile time."""


class Kernel:
    """A kernel on one GPU; calling it starts it on the current stream."""

    def __init__(self, driver: Driver, handle: int, device: torch.device, name: str) -> None:
        self._driver, self._handle, self._device, self._name = driver, handle, device, name

    def __call__(
        self, params: ctypes.Structure, *, grid: Dim, block: Dim, shared_bytes: int = 0
    ) -> None:
        """Start it with the struct `params` as its argument; what the struct points to must live.

        Raises:
            torch.OutOfMemoryError: the GPU has no memory left for it.
            LaunchError: the driver refuses the launch, or an earlier kernel has failed.
        """
        if self._device.type != "cuda":  # the emulator of the tests
            self._launch(params, grid, block, shared_bytes, stream=0)
            return
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if torch.cuda.current_device() == self._device.index:
            self._launch(params, grid, block, shared_bytes, stream)
            return
        with torch.cuda.device(self._device):
            self._launch(params, grid, block, shared_bytes, stream)

    def _launch(
        self, params: ctypes.Structure, grid: Dim, block: Dim, shared_bytes: int, stream: int
    ) -> None:
        self._driver.launch(
            self._handle,
            params,
            name=self._name,
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
            stream=stream,
        )


@dataclass(frozen=True)
class _Recipe:
    """What a library is compiled from."""

    source: str
    options: list[str]


class Gpu:
    """One GPU, its compiler and its driver."""

    def __init__(
        self,
        device: torch.device,
        *,
        capability: int,
        num_multiprocessors: int,
        nvrtc: Nvrtc,
        driver: Driver,
        cubins: CubinCache,
    ) -> None:
        self.device = device
        self.capability = capability
        """As 90 for 9.0."""
        self.num_multiprocessors = num_multiprocessors
        self._nvrtc, self._driver, self._cubins = nvrtc, driver, cubins
        self._version = "{}.{}".format(*nvrtc.version)
        self._libraries: dict[tuple[str, frozenset[tuple[str, str]]], int] = {}
        self._kernels: dict[tuple[int, str], Kernel] = {}

    @property
    def architecture(self) -> str:
        """What to compile for: machine code of this GPU, or PTX for its driver to finish.

        Raises:
            KernelError: the compiler knows only later GPUs.
        """
        known = [each for each in self._nvrtc.architectures if each >= OLDEST]
        if self.capability in known:
            return f"sm_{self.capability}"
        older = [each for each in known if each < self.capability]
        if not older:
            fix = "; install a PyTorch for an older CUDA" if self.capability >= OLDEST else ""
            raise KernelError(
                f"NVRTC {self._version} compiles the kernels for compute capability"
                f" {known[0] / 10} and later, and this GPU has {self.capability / 10}{fix}"
            )
        return f"compute_{older[-1]}"

    def kernel(self, name: str, entry: str, defines: Macros) -> Kernel:
        """The kernel `entry` of an operator's source with some macros, compiled at its first use.

        Its code is on the GPU then: the first launch has nothing left to load.

        Raises:
            KernelError: it can't be compiled or loaded; with the compiler's or driver's own words.
        """
        texts = {macro: str(value) for macro, value in defines.items()}
        key = (name, frozenset(texts.items()))
        try:
            if key not in self._libraries:
                self._libraries[key] = self._load(name, texts)
            library = self._libraries[key]
            if (library, entry) not in self._kernels:
                with self._context():
                    handle = self._driver.kernel(library, entry)
                self._kernels[library, entry] = Kernel(self._driver, handle, self.device, entry)
        except DriverError as error:
            raise KernelError(
                f"{_shown(name, texts)} can't be loaded onto {self.device} (compute capability"
                f" {self.capability / 10}) as NVRTC {self._version} ({self._nvrtc.path}) made it"
                f" for {self.architecture}: {error}{MENDS.get(error.code, '')}"
            ) from None
        return self._kernels[library, entry]

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Inside it the GPU's context is this thread's."""
        if self.device.type != "cuda":  # the emulator of the tests
            yield
            return
        with torch.cuda.device(self.device):
            # To choose a device that is chosen already binds nothing; a call of the runtime does.
            torch.cuda.mem_get_info(self.device)
            yield

    def forget(self, name: str, defines: Macros) -> None:
        """Have the next process compile a kernel anew, not take what is kept of it."""
        texts = {macro: str(value) for macro, value in defines.items()}
        self._cubins.remove(self._path(name, self._recipe(name, texts)))

    def _recipe(self, name: str, defines: Mapping[str, str]) -> _Recipe:
        source = (OPERATORS / name / "cuda.cu").read_text()
        macros = [f"-D{macro}={value}" for macro, value in sorted(defines.items())]
        options = [f"--gpu-architecture={self.architecture}", *OPTIONS, *macros]
        return _Recipe(source, options)

    def _path(self, name: str, recipe: _Recipe) -> Path:
        ingredients = [recipe.source, *HEADERS.values(), *recipe.options, self._version]
        return self._cubins.path(name, ingredients)

    def _load(self, name: str, defines: Mapping[str, str]) -> int:
        recipe = self._recipe(name, defines)
        path = self._path(name, recipe)
        image = self._cubins.read(path)
        if image is not None:
            try:
                return self._driver.load(image)
            except DriverError:
                pass  # a damaged file: make it again
        try:
            image, _ = self._nvrtc.compile(
                recipe.source,
                name=f"{name}.cu",
                headers=HEADERS,
                options=recipe.options,
            )
        except CompileError as error:
            words = "\n".join(str(error).splitlines()[:LOG_LINES])
            raise KernelError(
                f"{_shown(name, defines)} can't be compiled for {self.architecture} by NVRTC"
                f" {self._version} ({self._nvrtc.path}): {words}"
            ) from None
        self._cubins.write(path, image)
        return self._driver.load(image)


def _shown(name: str, defines: Mapping[str, str]) -> str:
    macros = ", ".join(f"{macro}={value}" for macro, value in sorted(defines.items()))
    return f"{name}[{macros}]"


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind a device of PyTorch; its number must be given.

    Raises:
        KernelError: kernels can't be compiled or started there; says why.
    """
    if torch.version.hip is not None:
        raise KernelError("this PyTorch is a build for ROCm")
    major, minor = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        device=device,
        capability=10 * major + minor,
        num_multiprocessors=properties.multi_processor_count,
        nvrtc=find_nvrtc(),
        driver=Driver(),
        cubins=CubinCache(cache_directory()),
    )
