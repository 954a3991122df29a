"""The CUDA driver, as far as it is needed: load code, find a kernel, start it; lock pages.

Called through ctypes. The functions are of CUDA 12.0; kernels of a library belong to no context.
"""

import ctypes
from pathlib import Path

import torch

from pipeline.errors import KernelError

Dim = tuple[int, int, int]

_POINTER = ctypes.c_void_p
_UNSIGNED = ctypes.c_uint

PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: pages are locked for all contexts."""

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class DriverError(KernelError):
    """The driver does not load code; the message says what it was asked."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class LaunchError(RuntimeError):
    """A kernel could not be started; what follows on this GPU can't be trusted."""


class Driver:
    """A loaded driver.

    Raises:
        KernelError: there is none, or it is older than CUDA 12.0.
    """

    def __init__(self, path: str | Path = "libcuda.so.1") -> None:
        try:
            library = ctypes.CDLL(str(path))
            launch, load = library.cuLaunchKernel, library.cuLibraryLoadData
            get_kernel, get_function = library.cuLibraryGetKernel, library.cuKernelGetFunction
            register, unregister = library.cuMemHostRegister_v2, library.cuMemHostUnregister
        except (OSError, AttributeError) as error:
            raise KernelError(
                f"{path} is not a CUDA driver of version 12.0 or later: {error}"
            ) from None
        launch.argtypes = [_POINTER, *[_UNSIGNED] * 7, _POINTER, _POINTER, _POINTER]
        load.argtypes = [_POINTER, ctypes.c_char_p, *[_POINTER] * 2, _UNSIGNED]
        load.argtypes += [*[_POINTER] * 2, _UNSIGNED]
        get_kernel.argtypes = [_POINTER, _POINTER, ctypes.c_char_p]
        get_function.argtypes = [_POINTER, _POINTER]
        register.argtypes, unregister.argtypes = [_POINTER, ctypes.c_size_t, _UNSIGNED], [_POINTER]
        self._register, self._unregister = register, unregister
        self._get_kernel, self._get_function = get_kernel, get_function
        self._launch, self._load, self._name_of = launch, load, library.cuGetErrorName
        self._check(library.cuInit(0), "cuInit")

    def load(self, image: bytes) -> int:
        """Handle of the library that a cubin, or PTX, is.

        Raises:
            DriverError: the driver refuses it.
        """
        library = _POINTER()
        code = self._load(ctypes.byref(library), image, None, None, 0, None, None, 0)
        self._check(code, "cuLibraryLoadData")
        assert library.value is not None
        return library.value

    def kernel(self, library: int, entry: str) -> int:
        """Handle of the kernel `entry` of a library, its code loaded into the current context.

        Raises:
            DriverError: it has none of that name, or the driver can't load it.
        """
        kernel = _POINTER()
        code = self._get_kernel(ctypes.byref(kernel), library, entry.encode())
        self._check(code, f"cuLibraryGetKernel of {entry}")
        assert kernel.value is not None
        # Code is loaded lazily, as a context first needs it: now, where a failure has a way out,
        # rather than at the first launch.
        function = _POINTER()
        code = self._get_function(ctypes.byref(function), kernel)
        self._check(code, f"cuKernelGetFunction of {entry}")
        return kernel.value

    def launch(
        self,
        kernel: int,
        params: ctypes.Structure,
        *,
        name: str,
        grid: Dim,
        block: Dim,
        shared_bytes: int,
        stream: int,
    ) -> None:
        """Start a kernel whose one parameter is the struct `params`, passed by value.

        Raises:
            torch.OutOfMemoryError: the GPU has no memory left for it.
            LaunchError: the driver refuses the launch, or an earlier kernel has failed.
        """
        arguments = (_POINTER * 1)(ctypes.addressof(params))
        code = self._launch(kernel, *grid, *block, shared_bytes, stream, arguments, None)
        if not code:
            return
        what = (
            f"the kernel {name} can't be started with grid {grid}, block {block},"
            f" {shared_bytes} bytes of shared memory: {self._name(code)}"
        )
        if code == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(what)
        raise LaunchError(
            f"{what}; an earlier kernel of this process may be to blame, and"
            " CUDA_LAUNCH_BLOCKING=1 in the environment tells which"
        )

    def register(self, address: int, num_bytes: int) -> None:
        """Lock pages of this process, so that GPUs read and write them by themselves.

        Raises:
            DriverError: the driver locks no more.
        """
        self._check(self._register(address, num_bytes, PORTABLE), f"to lock {num_bytes} bytes")

    def unregister(self, address: int) -> None:
        """Unlock pages that were locked together; `address` is that of the first.

        Raises:
            DriverError: they were not.
        """
        self._check(self._unregister(address), "to unlock memory")

    def _check(self, code: int, what: str) -> None:
        if code:
            raise DriverError(f"the CUDA driver refuses {what}: {self._name(code)}", code)

    def _name(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._name_of(code, ctypes.byref(name))
        return f"{(name.value or b'?').decode()} ({code})"
