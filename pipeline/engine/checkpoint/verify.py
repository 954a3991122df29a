"""Whether fragments are what was saved: their bytes against their CRC-32."""

import itertools
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import CheckpointError
from pipeline.files.tensor_io import read_at

CHUNK_BYTES = 4 * 2**20

THREADS = 4
"""They wait for the disk most of the time; zlib and the system let the others run."""


@dataclass(frozen=True)
class Checked:
    """One fragment: where it lies, and what it shall be."""

    file: Path
    label: str
    position: int
    nbytes: int
    crc32: int


def verify_fragments(fragments: Sequence[Checked]) -> None:
    """Read all of them; several threads a run each.

    Raises:
        CheckpointError: a file can't be read, or a fragment is damaged.
    """
    runs: list[list[Checked]] = [[] for _ in range(THREADS)]
    total = max(1, sum(fragment.nbytes for fragment in fragments))
    done = 0
    for fragment in fragments:
        runs[min(done * THREADS // total, THREADS - 1)].append(fragment)
        done += fragment.nbytes
    with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as threads:
        for _ in threads.map(_verify_run, runs):
            pass


def _verify_run(fragments: Sequence[Checked]) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for path, of_file in itertools.groupby(fragments, lambda fragment: fragment.file):
        try:
            with path.open("rb", buffering=0) as file:
                for fragment in of_file:
                    _verify(file.fileno(), fragment, buffer)
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error


def _verify(file: int, fragment: Checked, buffer: memoryview) -> None:
    checksum = 0
    for done in range(0, fragment.nbytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, fragment.nbytes - done)]
        position = fragment.position + done
        if done + CHUNK_BYTES < fragment.nbytes:  # the next one comes while this one is checked
            os.posix_fadvise(file, position + CHUNK_BYTES, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
        try:
            read_at(file, [chunk], position)
        except EOFError as error:
            raise CheckpointError(f"{fragment.file} lacks {fragment.label}: {error}") from error
        checksum = zlib.crc32(chunk, checksum)
    if checksum != fragment.crc32:
        raise CheckpointError(
            f"{fragment.label} in {fragment.file} is damaged: it is not what its CRC-32 says"
        )
