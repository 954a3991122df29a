"""NVRTC, the compiler of CUDA C++ that a CUDA build of PyTorch brings: no toolkit, no header.

Called through ctypes. https://docs.nvidia.com/cuda/nvrtc has the functions.
"""

import ctypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from pipeline.errors import KernelError


class CompileError(KernelError):
    """NVRTC refuses a source or an option; the message is its own."""


class Nvrtc:
    """A loaded NVRTC.

    Raises:
        KernelError: `path` is no NVRTC.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            # NVRTC opens its second library by name alone: in a Python package, where the system
            # doesn't search, it must be loaded before.
            if Path(path).is_absolute():
                for second in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                    ctypes.CDLL(str(second))
            self._library = ctypes.CDLL(str(path))
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise KernelError(f"{path} can't be loaded as NVRTC: {error}") from None
        self.path = str(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    @property
    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities it makes machine code for, such as 90 for 9.0, ascending."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(numbers))
        return tuple(sorted(numbers))

    def compile(
        self, source: str, *, name: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> tuple[bytes, str]:
        """The machine code, or PTX for a virtual architecture, and the compiler's messages.

        Args:
            source: CUDA C++.
            name: of the source, for messages.
            headers: what `#include` finds, by name.
            options: as of nvcc, `--gpu-architecture=sm_90` among them.

        Raises:
            CompileError: with the compiler's own words.
        """
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program),
                source.encode(),
                name.encode(),
                len(headers),
                _strings(headers.values()),
                _strings(headers),
            )
        )
        try:
            code = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if code:
                raise CompileError(log or self._error(code))
            virtual = any("=compute_" in option for option in options)
            return self._read(program, "PTX" if virtual else "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, content))
        return content.raw

    def _check(self, code: int) -> None:
        if code:
            raise CompileError(self._error(code))

    def _error(self, code: int) -> str:
        return self._library.nvrtcGetErrorString(code).decode()


def find_nvrtc() -> Nvrtc:
    """The NVRTC of PyTorch's own CUDA version.

    Raises:
        KernelError: this PyTorch has no CUDA, or there is no such NVRTC.
    """
    if torch.version.cuda is None:
        raise KernelError(f"this PyTorch ({torch.__version__}) is a build without CUDA")
    major = torch.version.cuda.partition(".")[0]
    name = f"libnvrtc.so.{major}"
    packages = (path for place in sys.path for path in Path(place).glob(f"nvidia/*/lib/{name}"))
    path = next(packages, None)
    try:
        return Nvrtc(name if path is None else path.resolve())
    except KernelError as error:
        package = "nvidia-cuda-nvrtc" + (f"-cu{major}" if int(major) < 13 else "")
        raise KernelError(
            f"{error}; install the package {package} of CUDA {torch.version.cuda}"
        ) from None


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)
