"""The CUDA driver, as far as kernels need it: load machine code, find a kernel, start it.

Called through ctypes. The functions are of CUDA 12.0; kernels of a library belong to no context.
"""

import ctypes
from pathlib import Path

from pipeline.errors import KernelError

Dim = tuple[int, int, int]

_POINTER = ctypes.c_void_p
_UNSIGNED = ctypes.c_uint


class Driver:
    """A loaded driver.

    Raises:
        KernelError: there is none, or it is older than CUDA 12.0.
    """

    def __init__(self, path: str | Path = "libcuda.so.1") -> None:
        try:
            library = ctypes.CDLL(str(path))
            launch, load = library.cuLaunchKernel, library.cuLibraryLoadData
            self._get_kernel = library.cuLibraryGetKernel
        except (OSError, AttributeError) as error:
            raise KernelError(
                f"{path} is no CUDA driver of version 12.0 or later: {error}"
            ) from None
        launch.argtypes = [_POINTER, *[_UNSIGNED] * 7, _POINTER, _POINTER, _POINTER]
        load.argtypes = [_POINTER, ctypes.c_char_p, *[_POINTER] * 2, _UNSIGNED]
        load.argtypes += [*[_POINTER] * 2, _UNSIGNED]
        self._get_kernel.argtypes = [_POINTER, _POINTER, ctypes.c_char_p]
        self._launch, self._load, self._name_of = launch, load, library.cuGetErrorName
        self._check(library.cuInit(0), "cuInit")

    def load(self, image: bytes) -> int:
        """Handle of the library that a cubin, or PTX, is.

        Raises:
            KernelError: the driver refuses it.
        """
        library = _POINTER()
        code = self._load(ctypes.byref(library), image, None, None, 0, None, None, 0)
        self._check(code, "cuLibraryLoadData")
        assert library.value is not None
        return library.value

    def kernel(self, library: int, entry: str) -> int:
        """Handle of the kernel `entry` of a library.

        Raises:
            KernelError: it has none of that name.
        """
        kernel = _POINTER()
        code = self._get_kernel(ctypes.byref(kernel), library, entry.encode())
        self._check(code, f"cuLibraryGetKernel of {entry}")
        assert kernel.value is not None
        return kernel.value

    def launch(
        self,
        kernel: int,
        params: ctypes.Structure,
        *,
        grid: Dim,
        block: Dim,
        shared_bytes: int,
        stream: int,
    ) -> None:
        """Start a kernel whose one parameter is the struct `params`, passed by value.

        Raises:
            KernelError: the driver refuses the launch.
        """
        arguments = (_POINTER * 1)(ctypes.addressof(params))
        code = self._launch(kernel, *grid, *block, shared_bytes, stream, arguments, None)
        if code:
            self._check(code, f"cuLaunchKernel, grid {grid}, block {block}, {shared_bytes} bytes")

    def _check(self, code: int, what: str) -> None:
        if not code:
            return
        name = ctypes.c_char_p()
        self._name_of(code, ctypes.byref(name))
        raise KernelError(
            f"the CUDA driver refuses {what}: {(name.value or b'?').decode()} ({code})"
        )
