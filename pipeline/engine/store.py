"""Flat tensors that wait on a disk instead of in memory."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from jaxtyping import Shaped
from torch import Tensor

from pipeline.errors import ConfigError, OffloadError
from pipeline.faults import fault_point
from pipeline.files.tensor_io import bytes_of, read_at, write_at

ALIGNMENT = 4096
"""Tensors begin at multiples of a disk's block."""

STAMP_BYTES = 8


@dataclass
class _Slot:
    """Where one tensor lies, and the number of its last write."""

    position: int
    numel: int
    dtype: torch.dtype
    generation: int = 0

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorStore:
    """One process's tensors in a scratch file of `directory`, NVMe or any other disk.

    The file has no name, so nothing is left on the disk however the process ends. All space is
    taken by `reserve`, so that a full disk stops a run at its start. `write` and `read` return at
    once and copy nothing: until `wait` (or `flush`) the caller neither changes a tensor that is
    being written nor looks at one that is being read. Operations on one key happen in the order of
    the calls.

    Every tensor is followed by the number of its last write, so that what a failed write or a
    damaged file left behind is never taken for data. The first operation that fails makes that
    call's `wait`, and every later call, raise `OffloadError`. Scratch data: nothing is flushed to
    the device.
    """

    def __init__(self, directory: Path, *, rank: int, threads: int = 2) -> None:
        self.directory = directory
        self.rank = rank
        self._slots: dict[str, _Slot] = {}
        self._pending: dict[str, Future[None]] = {}
        self._failures: list[str] = []
        self._size = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"the offload directory {directory} can't be written to: {error.strerror}"
            ) from error
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tensor-store")
        self._release = weakref.finalize(self, _release, self._threads, self._file)

    def reserve(self, sizes: Mapping[str, int], dtype: torch.dtype) -> None:
        """Take the space of new tensors: the number of elements by key.

        Raises:
            ConfigError: the disk doesn't have it.
        """
        end = self._size
        slots: dict[str, _Slot] = {}
        for key, numel in sizes.items():
            if key in self._slots:
                raise ValueError(f"{key} is reserved already")
            slots[key] = _Slot(position=end, numel=numel, dtype=dtype)
            end += -(-(slots[key].nbytes + STAMP_BYTES) // ALIGNMENT) * ALIGNMENT
        needed = end - self._size
        if needed == 0:
            return
        free = shutil.disk_usage(self._file.fileno()).free
        if needed > free:
            raise self._lacks_space(needed, "free space there")
        try:
            os.posix_fallocate(self._file.fileno(), self._size, needed)
        except OSError as error:
            raise self._lacks_space(needed, f"{error.strerror}: free space there") from error
        self._slots.update(slots)
        self._size = end

    def write(self, key: str, tensor: Shaped[Tensor, " n"]) -> None:
        """Begin to write; `tensor` stays unchanged until `wait`."""
        slot = self._slot(key, tensor)
        slot.generation += 1
        parts, file, position = (
            [bytes_of(tensor), _stamp(slot.generation)],
            self._file,
            slot.position,
        )

        def work() -> None:
            fault_point("offload.write")
            write_at(file.fileno(), parts, position)

        self._begin(key, None, "written", work)

    def read(self, key: str, out: Shaped[Tensor, " n"], *, after: str | None = None) -> None:
        """Begin to read into `out`, which holds the tensor after `wait`.

        With `after`, the operation under way on that key ends first: what is being written from a
        buffer leaves it before other data comes in.
        """
        slot = self._slot(key, out)
        if slot.generation == 0:
            raise ValueError(f"{key} was never written")
        expected, found = _stamp(slot.generation), memoryview(bytearray(STAMP_BYTES))
        parts, file, position = [bytes_of(out), found], self._file, slot.position

        def work() -> None:
            fault_point("offload.read")
            read_at(file.fileno(), parts, position)
            if found != expected:
                raise EOFError("it is not what was written last")

        self._begin(key, after, "read", work)

    def wait(self, key: str) -> None:
        """Return when nothing is under way on `key`.

        Raises:
            OffloadError: that, or another operation before it, failed.
        """
        pending = self._pending.pop(key, None)
        if pending is not None:
            pending.result()
        self._raise_failure()

    def flush(self) -> None:
        """Return when nothing is under way.

        Raises:
            OffloadError: an operation failed.
        """
        for key in list(self._pending):
            self.wait(key)
        self._raise_failure()

    def close(self) -> None:
        """Give the space back, after what is under way; twice is once."""
        self._release()

    def _slot(self, key: str, tensor: Tensor) -> _Slot:
        self._raise_failure()
        slot = self._slots[key]
        if (tensor.shape, tensor.dtype) != ((slot.numel,), slot.dtype):
            raise ValueError(
                f"{key} has shape ({slot.numel},) and is {slot.dtype}, not {tuple(tensor.shape)} "
                f"and {tensor.dtype}"
            )
        return slot

    def _begin(self, key: str, after: str | None, verb: str, work: Callable[[], None]) -> None:
        """Queue `work` behind what is under way on `key` and on `after`.

        No thread can wait for ever: they take the work in order, so what one waits for has begun.
        """
        before = [self._pending[name] for name in (key, after) if name in self._pending]
        place = f"the offload file of rank {self.rank} in {self.directory}"
        failures = self._failures

        def run() -> None:  # without `self`: a forgotten store closes in the caller's thread
            for operation in before:
                operation.result()
            if failures:
                return
            try:
                work()
            except (OSError, EOFError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                failures.append(f"{key} can't be {verb} in {place}: {reason}")

        self._pending[key] = self._threads.submit(run)

    def _raise_failure(self) -> None:
        if self._failures:
            raise OffloadError(self._failures[0])

    def _lacks_space(self, needed: int, fix: str) -> ConfigError:
        free = shutil.disk_usage(self._file.fileno()).free
        return ConfigError(
            f"the offload directory {self.directory} has {free:,} bytes free of the {needed:,} that"
            f" rank {self.rank} needs; {fix}, or choose another directory"
        )


def _stamp(generation: int) -> memoryview:
    return memoryview(generation.to_bytes(STAMP_BYTES, "little"))


def _release(threads: ThreadPoolExecutor, file: IO[bytes]) -> None:
    threads.shutdown()
    file.close()
