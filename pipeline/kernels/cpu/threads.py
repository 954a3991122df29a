"""The threads of PyTorch's own OpenMP, for kernels that run between its operators.

Threads of another pool would wait for a core while PyTorch's are still awake on it.
"""

import ctypes
import functools
from pathlib import Path

LOADED = Path("/proc/self/maps")
RUNTIMES = ("libgomp", "libiomp", "libomp")


@functools.cache
def parallel() -> ctypes.c_void_p | None:
    """`GOMP_parallel(function, argument, threads, flags)`; None where PyTorch has none.

    OpenMP's runtimes of GNU, Intel and LLVM all have it.
    """
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
    for path in found:
        try:
            function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        except OSError:
            continue  # deleted since it was loaded
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p)
    return None
