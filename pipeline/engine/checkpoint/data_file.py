"""One process's file: written once, with the checksums of its fragments taken on the way."""

import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.engine.checkpoint.header import write_header
from pipeline.engine.checkpoint.host_copy import HostFragment
from pipeline.engine.checkpoint.manifest import StoredFile
from pipeline.faults import fault_point
from pipeline.files.tensor_io import write_at

CHUNK_BYTES = 2**20
"""Small enough that what was just checked is written from the processor's cache."""

CHUNK_PARTS = 512
"""Pieces in one system call, which takes 1,024."""

THREADS = 2

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
