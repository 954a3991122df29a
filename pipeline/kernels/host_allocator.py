"""Keep freed host memory for later tensors instead of returning it to the system."""

from pathlib import Path

import torch

from pipeline.kernels.build import Library, build

_installed: list[Library] = []


def keep_freed_memory() -> None:
    """Reuse freed memory for later tensors, in the whole process.

    By default, large tensors' memory is returned as soon as they are freed, and every page of the
    next step's activations is faulted in and zeroed again, which takes a tenth of a step. This has
    no effect if `host_allocator.cpp` can't be compiled.
    """
    if _installed:
        return
    home = Path(torch.__file__).parent
    flags = (f"-I{home / 'include'}", f"-L{home / 'lib'}", "-Wl,--no-as-needed", "-lc10")
    version = {"TORCH": torch.__version__.replace("+", "_")}  # part of the library's name
    library = build(Path(__file__).with_suffix(".cpp"), version, flags)
    if not isinstance(library, str):
        library.install()
        _installed.append(library)


def return_freed_memory() -> None:
    """Return freed memory to the system, after copying a model's weights or before loading one."""
    for library in _installed:
        library.release()
