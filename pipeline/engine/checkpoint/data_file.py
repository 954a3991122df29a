"""One process's file: written once, with the checksums of its fragments taken on the way."""

import os
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.engine.checkpoint.header import Entry, read_header, write_header
from pipeline.engine.checkpoint.host_copy import HostFragment
from pipeline.engine.checkpoint.manifest import StoredFile
from pipeline.errors import CheckpointError
from pipeline.faults import fault_point
from pipeline.files.tensor_io import read_at, write_at

CHUNK_BYTES = 2**20
"""Small enough that what was just checked is written from the processor's cache."""

CHUNK_PARTS = 512
"""Pieces in one system call, which takes 1,024."""

THREADS = 2

COPY_BYTES = 8 * 2**20
"""Read, checked and written at once, where a file is copied."""

FLUSH_BYTES = 64 * 2**20
"""Bytes of a copy that may wait for the disk."""

FLUSH_SECONDS = 0.05
"""The disk takes what is written so often, so that little is left to wait for at the end."""


def write_data_file(path: Path, fragments: Sequence[HostFragment]) -> StoredFile:
    """Write the fragments to a new file, onto the disk; what the manifest says of it.

    The space is taken first, so that a full disk is known before anything is written.

    Raises:
        OSError: the system can't write.
    """
    # Large numbers first: then each is aligned without a gap, which the format forbids.
    ordered = sorted(fragments, key=lambda fragment: -fragment.dtype.itemsize)
    tensors = [(each.label, each.dtype, each.nbytes // each.dtype.itemsize) for each in ordered]
    header = write_header(tensors, [0] * len(ordered))
    size = len(header) + sum(fragment.nbytes for fragment in ordered)
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        checksums = _write_fragments(file.fileno(), ordered, len(header))
        fault_point("checkpoint.mid_file")
        header = write_header(tensors, checksums)
        write_at(file.fileno(), [memoryview(header)], 0)
        os.fsync(file.fileno())
    fault_point("checkpoint.after_file")
    return StoredFile(nbytes=size, header_crc32=zlib.crc32(header))


def copy_data_file(source: Path, target: Path, stored: StoredFile) -> None:
    """Copy a file to another disk, onto it, and compare what is read with its checksums.

    Raises:
        OSError: the system can't read or write.
        CheckpointError: `source` is not what was saved.
    """
    checks = _Checks(source, read_header(source, nbytes=stored.nbytes, crc32=stored.header_crc32))
    buffer = memoryview(bytearray(COPY_BYTES))
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as written:
        os.posix_fallocate(written.fileno(), 0, stored.nbytes)
        for position in range(0, stored.nbytes, COPY_BYTES):
            chunk = buffer[: min(COPY_BYTES, stored.nbytes - position)]
            try:
                read_at(read.fileno(), [chunk], position)
            except EOFError as error:
                raise CheckpointError(f"{source} is cut off: {error}") from error
            checks.take(chunk, position)
            write_at(written.fileno(), [chunk], position)
            if position % FLUSH_BYTES == 0:
                os.fdatasync(written.fileno())
            fault_point("upload.mid_file")
        os.fsync(written.fileno())
    fault_point("upload.after_file")


class _Checks:
    """The CRC-32s of a file's fragments, whose bytes come in the order in which they lie."""

    def __init__(self, file: Path, entries: Sequence[Entry]) -> None:
        self._file = file
        self._left = deque(entry for entry in entries if entry.nbytes)
        self._checksum = 0

    def take(self, chunk: memoryview, position: int) -> None:
        """The next bytes, of which the first is at that position of the file.

        Raises:
            CheckpointError: a fragment that ends in them is not what was saved.
        """
        end = position + chunk.nbytes
        while self._left and self._left[0].position < end:
            entry = self._left[0]
            stop = entry.position + entry.nbytes
            piece = chunk[max(entry.position - position, 0) : stop - position]
            self._checksum = zlib.crc32(piece, self._checksum)
            if stop > end:
                return
            if self._checksum != entry.crc32:
                raise CheckpointError(
                    f"{entry.label} in {self._file} is damaged: it is not what its CRC-32 says"
                )
            self._left.popleft()
            self._checksum = 0


def _write_fragments(file: int, fragments: Sequence[HostFragment], position: int) -> list[int]:
    """Write the fragments from `position` on, several threads a run of them each; their CRCs."""
    runs: list[list[HostFragment]] = [[] for _ in range(THREADS)]
    starts = [position] * THREADS
    total = max(1, sum(fragment.nbytes for fragment in fragments))
    done = 0
    for fragment in fragments:
        index = min(done * THREADS // total, THREADS - 1)
        if not runs[index]:
            starts[index] = position + done
        runs[index].append(fragment)
        done += fragment.nbytes
    written = threading.Event()
    with ThreadPoolExecutor(THREADS + 1, thread_name_prefix="checkpoint") as threads:
        flushed = threads.submit(_flush_until, written, file)
        try:
            checksums = list(threads.map(_write_run, [file] * THREADS, runs, starts))
        finally:
            written.set()
        flushed.result()
    return [checksum for run in checksums for checksum in run]


def _flush_until(written: threading.Event, file: int) -> None:
    while not written.wait(FLUSH_SECONDS):
        os.fdatasync(file)


def _write_run(file: int, fragments: Sequence[HostFragment], position: int) -> list[int]:
    checksums: list[int] = []
    waiting: list[memoryview] = []
    waiting_bytes = 0
    for fragment in fragments:
        checksum = 0
        for chunk in _chunks(fragment):
            checksum = zlib.crc32(chunk, checksum)
            waiting.append(chunk)
            waiting_bytes += chunk.nbytes
            if waiting_bytes >= CHUNK_BYTES or len(waiting) == CHUNK_PARTS:
                write_at(file, waiting, position)
                position += waiting_bytes
                waiting, waiting_bytes = [], 0
        checksums.append(checksum)
    write_at(file, waiting, position)
    return checksums


def _chunks(fragment: HostFragment) -> Iterator[memoryview]:
    for part in fragment.parts:
        for start in range(0, part.nbytes, CHUNK_BYTES):
            yield part[start : start + CHUNK_BYTES]
