"""The threads of PyTorch's own OpenMP, for kernels that run between its operators.

Threads of another pool would wait for a core while PyTorch's are still awake on it.
"""

import ctypes
import functools
from pathlib import Path

LOADED = Path("/proc/self/maps")
RUNTIMES = ("libgomp", "libiomp", "libomp")


def parallel() -> ctypes.c_void_p | None:
    """`GOMP_parallel(function, argument, threads, flags)`; None where PyTorch has none.

    OpenMP's runtimes of GNU, Intel and LLVM all have it.
    """
    runtime = openmp_runtime()
    return None if runtime is None else _pointer(str(runtime))


@functools.cache
def openmp_runtime() -> Path | None:
    """The library in this process that has `GOMP_parallel`, PyTorch's own first."""
    try:
        lines = LOADED.read_text().splitlines()
    except OSError:
        return None  # not Linux
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    # PyTorch's own first: others may have been loaded by other packages.
    found = sorted(
        (path for path in paths if Path(path).name.startswith(RUNTIMES)),
        key=lambda path: ("/torch/" not in path and "/torch.libs/" not in path, path),
    )
    return next((Path(path) for path in found if _pointer(path) is not None), None)


@functools.cache
def _pointer(path: str) -> ctypes.c_void_p | None:
    try:
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
    except OSError:
        return None  # deleted since it was loaded
    return None if function is None else ctypes.cast(function, ctypes.c_void_p)
