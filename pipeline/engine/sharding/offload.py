"""Optimizer state and weights in a scratch file on disk."""

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from jaxtyping import Shaped
from torch import Tensor

from pipeline.engine.comm.collectives import BufferPool, Collectives
from pipeline.files.tensor_io import read_at, view_bytes, write_at
from pipeline.kernels.adamw import new_moments
from pipeline.system.errors import ConfigError, OffloadError
from pipeline.system.faults import fault_point

ALIGNMENT = 4096
"""Alignment of tensors in bytes: a multiple of a disk's block size."""


class ScratchFile(io.FileIO):
    """A file that is closed when the last reference to it is dropped.

    A finalizer that waited for the store's threads could deadlock: garbage collection may run it
    inside `threading`, while the locks it needs are held.
    """

    def __del__(self) -> None:
        self.close()


class TensorStore:
    """One process's tensors in a scratch file in `directory`, on NVMe or any other disk.

    The file is unlinked, so nothing is left on disk however the process ends. All space is
    allocated by `reserve`, so that a full disk stops a run at its start. `write` and `read` return
    immediately and copy nothing: until `wait` (or `flush`) the caller must not change a tensor
    being written or use one being read. Operations on one key run in call order. After a failure,
    all further operations raise `OffloadError`.
    """

    def __init__(self, directory: Path, *, rank: int, threads: int = 2) -> None:
        self.directory = directory
        self.rank = rank
        self._offsets: dict[str, int] = {}
        self._pending: dict[str, Future[None]] = {}
        self._failures: list[str] = []
        self._size = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                self._file = ScratchFile(os.dup(file.fileno()), "r+b")
        except OSError as error:
            raise ConfigError(
                f"the offload directory {directory} is not writable: {error.strerror}"
            ) from error
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tensor-store")

    def reserve(self, sizes: Mapping[str, int], dtype: torch.dtype) -> None:
        """Allocate space for new tensors, given the number of elements by key.

        Raises:
            ConfigError: the disk lacks space.
        """
        end = self._size
        offsets: dict[str, int] = {}
        for key, numel in sizes.items():
            offsets[key] = end
            end += -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        needed, free = end - self._size, shutil.disk_usage(self._file.fileno()).free
        try:
            if 0 < needed <= free:
                os.posix_fallocate(self._file.fileno(), self._size, needed)
        except OSError:
            free = 0
        if needed > free:
            raise ConfigError(
                f"the offload directory {self.directory} has too little free space: rank"
                f" {self.rank} needs {needed:,} bytes; free up space, or choose another directory"
            )
        self._offsets.update(offsets)
        self._size = end

    def write(self, key: str, tensor: Shaped[Tensor, " n"]) -> None:
        """Start writing `tensor`, which must not change until `wait`."""
        self._submit(key, tensor, None, "offload.write", "written to", write_at)

    def read(self, key: str, out: Shaped[Tensor, " n"], *, after: str | None = None) -> None:
        """Start reading into `out`, which contains the tensor's value after `wait`.

        Pending operations on the key `after`, which may use the same memory, complete first.
        """
        self._submit(key, out, after, "offload.read", "read from", read_at)

    def wait(self, key: str) -> None:
        """Wait for the pending operations on `key`.

        Raises:
            OffloadError: this or an earlier operation failed.
        """
        pending = self._pending.pop(key, None)
        if pending is not None:
            pending.result()
        self._raise_failure()

    def flush(self) -> None:
        """Wait for all pending operations.

        Raises:
            OffloadError: an operation failed.
        """
        for key in list(self._pending):
            self.wait(key)
        self._raise_failure()

    def close(self) -> None:
        """Release the space once pending operations are done."""
        self._threads.shutdown()
        self._file.close()

    def _submit(
        self,
        key: str,
        tensor: Tensor,
        after: str | None,
        fault: str,
        verb: str,
        transfer: Callable[[int, memoryview, int], None],
    ) -> None:
        """Queue the transfer of `tensor` after pending operations on `key` and on `after`."""
        self._raise_failure()
        data, file, offset = view_bytes(tensor), self._file, self._offsets[key]
        dependencies = [self._pending[k] for k in (key, after) if k in self._pending]
        name = f"the offload file of rank {self.rank} in {self.directory}"
        failures = self._failures

        def run() -> None:  # without `self`: pending operations keep only the file alive
            for operation in dependencies:
                operation.result()
            if failures:
                return
            try:
                fault_point(fault)
                transfer(file.fileno(), data, offset)
            except (OSError, EOFError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                failures.append(f"{key} can't be {verb} {name}: {reason}")

        self._pending[key] = self._threads.submit(run)

    def _raise_failure(self) -> None:
        if self._failures:
            raise OffloadError(self._failures[0])


class StreamedState:
    """Master weights and moments of many groups in a store; at most two groups are in memory.

    `sizes` lists the number of elements of each group; `moments` is the dtype of Adam's moments.
    While one group is updated, the previous one is written from the other set of buffers, and the
    next one is read into that set.
    """

    def __init__(
        self, store: TensorStore, sizes: Sequence[int], moments: torch.dtype = torch.float32
    ) -> None:
        self.store = store
        self.sizes = list(sizes)
        largest = torch.zeros(max(self.sizes, default=0))
        self._buffer_sets = [
            {"master": torch.zeros_like(largest), **new_moments(largest, moments)} for _ in range(2)
        ]
        self.names = tuple(self._buffer_sets[0])
        """Names of the fp32 masters and their AdamW moments."""
        for name, buffer in self._buffer_sets[0].items():
            sizes_by_key = {_key(group, name): size for group, size in enumerate(self.sizes)}
            store.reserve(sizes_by_key, buffer.dtype)

    def write(self, group: int, tensors: Sequence[Shaped[Tensor, " _"]]) -> None:
        """Store a group's tensors, in the order of `names`; return when they are written."""
        for name, tensor in zip(self.names, tensors, strict=True):
            self.store.write(_key(group, name), tensor)
        self._wait(group)

    def stream(self, order: Sequence[int]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield each group in `order`, which has no duplicates, with its tensors in `names` order.

        In-place changes are written to disk after the loop's body, and the group after the next
        reuses the buffers. If the body raises or breaks, the group is left unchanged on disk.

        Raises:
            OffloadError: the disk failed.
        """
        try:
            for index, group in enumerate(order):
                if index == 0:
                    self._read(group, index, after=None)
                if index + 1 < len(order):
                    previous = order[index - 1] if index else None
                    self._read(order[index + 1], index + 1, after=previous)
                self._wait(group)
                tensors = self._views(group, index)
                yield group, tensors
                for name, tensor in zip(self.names, tensors, strict=True):
                    self.store.write(_key(group, name), tensor)
        finally:
            self.store.flush()  # the buffers can be reused

    def _read(self, group: int, index: int, *, after: int | None) -> None:
        for name, tensor in zip(self.names, self._views(group, index), strict=True):
            after_key = None if after is None else _key(after, name)
            self.store.read(_key(group, name), tensor, after=after_key)

    def _wait(self, group: int) -> None:
        for name in self.names:
            self.store.wait(_key(group, name))

    def _views(self, group: int, index: int) -> tuple[Tensor, ...]:
        buffers = self._buffer_sets[index % 2]
        return tuple(buffer[: self.sizes[group]] for buffer in buffers.values())


def _key(group: int, name: str) -> str:
    return f"group {group} {name}"


class WeightDisk:
    """A scratch file for this process's weight shards, and the buffers through which they are read.

    Raises:
        OffloadError: raised by any method once the disk has failed.
    """

    def __init__(self, directory: Path, comm: Collectives) -> None:
        self.store = TensorStore(directory, rank=comm.group.global_rank)
        self.pool = BufferPool(comm, torch.device("cpu"))
        self._pending_write: tuple[DiskShard, Tensor] | None = None

    def allocate(self, name: str, numel: int, dtype: torch.dtype) -> "DiskShard":
        """Allocate space for a shard.

        Raises:
            ConfigError: the disk lacks space.
        """
        self.store.reserve({name: numel}, dtype)
        return DiskShard(self, name, numel, dtype)

    def write(self, shard: "DiskShard", values: Tensor) -> None:
        """Start writing a shard while the previous write completes."""
        buffer = self.pool.acquire(shard.numel, shard.dtype)
        buffer.copy_(values)
        self.store.write(shard.name, buffer)
        self.wait_for_write()
        self._pending_write = (shard, buffer)

    def wait_for_write(self) -> None:
        """Wait for the last write."""
        if self._pending_write is not None:
            (shard, buffer), self._pending_write = self._pending_write, None
            self.store.wait(shard.name)
            self.pool.release(buffer)


class DiskShard:
    """This process's shard of one flat vector, on disk."""

    def __init__(self, disk: WeightDisk, name: str, numel: int, dtype: torch.dtype) -> None:
        self.disk, self.name, self.numel, self.dtype = disk, name, numel, dtype
        self._buffer: Tensor | None = None

    def start_read(self) -> None:
        """Start reading the shard into memory."""
        if self._buffer is None:
            self.disk.wait_for_write()
            self._buffer = self.disk.pool.acquire(self.numel, self.dtype)
            self.disk.store.read(self.name, self._buffer)

    def read(self) -> Shaped[Tensor, " k"]:
        """Read the shard into memory; the result is valid until `release`."""
        self.start_read()
        assert self._buffer is not None
        self.disk.store.wait(self.name)
        return self._buffer

    def release(self) -> None:
        """End a `read`; its memory may then be reused."""
        if self._buffer is not None:
            self.disk.store.wait(self.name)  # an unused prefetch may still be running
            self.disk.pool.release(self._buffer)
            self._buffer = None

    def write(self, values: Tensor) -> None:
        """Start replacing the shard's values on disk."""
        self.release()
        self.disk.write(self, values)
