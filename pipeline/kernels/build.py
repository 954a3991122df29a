"""Build C++ kernels on first use.

A kernel is a file of plain C++ with a few C functions, called through `ctypes`: files with
PyTorch's headers take twenty seconds to compile, these take about one. Libraries are cached by a
hash of source, flags and compiler. Processes that need the same library at the same time each
compile it and rename the complete file into place.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from pipeline.system.errors import KernelError

CACHE = "RLHF_PIPELINE_CACHE"
"""Environment variable with the directory for compiled kernels."""

COMPILERS = ("c++", "g++", "clang++")
"""Compilers to try, in this order, if CXX is not set."""

Library = ctypes.CDLL

FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-pthread")

EXACT = ("-ffp-contract=off",)
"""Flags that keep products and sums separate, each rounded."""

FUSED = ("-ffp-contract=fast",)
"""Flags that fuse a product and a sum, as required by `include/vectors.h`."""

AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, *(f"-mavx512{name}" for name in ("f", "bw", "dq", "vl")))
INSTRUCTIONS = {"AVX2": AVX2, "AVX512": (*AVX512, "-mprefer-vector-width=512")}
"""Flags by PyTorch's name of an x86 processor's capability. Not -march=native, because machines may
share a cache."""

CPP_DTYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16"}
"""Names of dtypes in `include/vectors.h`."""

HEADERS = Path(__file__).parent / "include"

COMPILE_SECONDS = 120

logger = logging.getLogger(__name__)


def build(
    source: Path, defines: Mapping[str, str | int], flags: Sequence[str] = EXACT
) -> Library | str:
    """Compile a C++ source with these macros into a library, or return the reason for failure."""
    try:
        arguments = [*FLAGS, *flags, *instruction_flags()]
        arguments += [f"-D{name}={value}" for name, value in defines.items()]
        return _build(compiler(), source, arguments)
    except KernelError as reason:
        return str(reason)
    except OSError as error:  # no writable directory, or a full disk
        return f"it can't be saved: {error}"


def _build(command: Sequence[str], source: Path, arguments: Sequence[str]) -> Library:
    texts = [file.read_text() for file in (source, *sorted(HEADERS.glob("*.h")))]
    version = run_compiler([*command, "--version"])
    inputs = [*command, version, platform.machine(), *arguments, *texts]
    digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()
    name = f"{source.stem}-{digest[:24]}.so"
    directory = cache_directory()
    cached = directory / name if directory else None
    if cached is not None and cached.exists():
        return load(cached)
    with tempfile.TemporaryDirectory() as private:
        path = cached or Path(private) / name
        with atomic_file(path) as temporary:
            run_compiler([*command, *arguments, str(source), "-o", str(temporary)])
        return load(path)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Context manager for a temporary file, which is flushed and renamed to `path` at the end."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    temporary = Path(name)
    try:
        yield temporary
        os.fsync(handle)
        temporary.replace(path)
    finally:
        os.close(handle)
        temporary.unlink(missing_ok=True)


def cache_directory() -> Path | None:
    """Return the directory of this user's compiled kernels, created if necessary.

    Since code is loaded from it, warn and return None if it is unusable or others can write to it.
    """
    configured, base = os.environ.get(CACHE), os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(base).absolute() if base else Path.home() / ".cache"
        default = cache / "rlhf-pipeline" / "kernels"
        directory = Path(configured).absolute() if configured else default
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{directory} belongs to another user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{directory} is writable by other users")
        if not os.access(directory, os.W_OK):
            raise PermissionError(f"{directory} is not writable")
    except (OSError, RuntimeError) as error:
        _warn(f"compiled kernels are not cached: {error}; set {CACHE} to another directory")
        return None
    return directory


def compiler() -> list[str]:
    """Return the C++ compiler's command: CXX, or the first compiler that is installed.

    Raises:
        KernelError: no compiler is installed.
    """
    cxx = shlex.split(os.environ.get("CXX", ""))
    for arguments in [cxx] if cxx else [[name] for name in COMPILERS]:
        if path := shutil.which(arguments[0]):
            return [path, *arguments[1:]]
    if cxx:
        raise KernelError(f"the compiler set by CXX, {cxx[0]}, was not found")
    raise KernelError("no C++ compiler was found; install g++ or clang++, or set CXX")


def run_compiler(command: Sequence[str]) -> str:
    """Run the compiler and return its output.

    Raises:
        KernelError: the compiler fails.
    """
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"the compiler {command[0]} can't be run: {error}") from error
    if result.returncode != 0:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        raise KernelError(
            f"the compiler {command[0]} failed with exit code {result.returncode}: {errors[0]}"
        )
    return result.stdout


def load(library: Path) -> Library:
    """Load the library into this process.

    Raises:
        KernelError: the library can't be loaded.
    """
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelError(
            f"{library} can't be loaded ({error}); set {CACHE} to a directory on a file system"
            " mounted without noexec"
        ) from error


def instruction_flags() -> tuple[str, ...]:
    """Return the flags for the instructions that PyTorch uses on this processor.

    Raises:
        KernelError: the kernels don't support the processor.
    """
    if platform.machine() in ("aarch64", "arm64"):
        return ()
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in INSTRUCTIONS:
        raise KernelError(
            f"the processor ({platform.machine()}, {capability}) is neither x86 with AVX2 or"
            " AVX-512 nor 64-bit ARM"
        )
    return INSTRUCTIONS[capability]


def bf16_flags() -> tuple[str, ...]:
    """Return the flags for instructions that multiply bf16 pairs, if the processor has them."""
    return ("-mavx512bf16",) if has_avx512() and has_avx512_bf16() else ()


def has_avx512() -> bool:
    """Return whether PyTorch uses 512-bit vectors on this processor."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def is_amd() -> bool:
    """Return whether this is an AMD x86 processor, or False on systems other than Linux."""
    path = Path("/proc/cpuinfo")
    return path.exists() and "AuthenticAMD" in path.read_text()


def has_avx512_bf16() -> bool:
    """Return whether an x86 processor has instructions that multiply bf16.

    `ONEDNN_MAX_CPU_ISA` can disable them, as in oneDNN.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit and limit != "ALL" and "BF16" not in limit and "AMX" not in limit:
        return False
    # A private function of PyTorch, which may be missing.
    return getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


@functools.cache
def gomp_parallel() -> ctypes.c_void_p | None:
    """Return `GOMP_parallel(function, argument, threads, flags)` of PyTorch's OpenMP runtime.

    Its threads may still be spinning after PyTorch's last operator, and a second runtime would
    compete for their cores. The GNU, Intel and LLVM runtimes all have the function. The
    result is None on systems other than Linux.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    runtimes = ("libgomp", "libiomp", "libomp")
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    # PyTorch's own runtime first: other packages may have loaded theirs.
    for path in sorted(paths, key=lambda path: "/torch" not in path):
        if Path(path).name.startswith(runtimes):
            function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if function is not None:
                return ctypes.cast(function, ctypes.c_void_p)
    return None


@functools.cache
def _warn(message: str) -> None:
    """Log a warning, once per process."""
    logger.warning("%s", message)
