"""The head of a safetensors file, written and, trusting nothing, read.

A file is 8 bytes of length, that many bytes of JSON, and the tensors' bytes without a gap
(https://github.com/huggingface/safetensors#format). Ours hold flat tensors only.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import CheckpointError
from pipeline.files.weight_files import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_BYTES = 100_000_000
"""The format's own limit: a longer header is an attack or garbage."""

ALIGNMENT = 4096
LENGTH_BYTES = 8

METADATA, CHECKSUMS = "__metadata__", "crc32"
"""Where the format has room for text, and what stands there: CRC-32s in the tensors' order."""


@dataclass(frozen=True)
class Entry:
    """Where one flat tensor lies in a file."""

    label: str
    dtype: torch.dtype
    numel: int
    position: int
    """Of its first byte in the file."""

    crc32: int | None = None
    """Of its bytes; files of the first format leave it to the manifest."""

    @property
    def nbytes(self) -> int:
        """The bytes it takes."""
        return self.numel * self.dtype.itemsize


def write_header(
    tensors: Sequence[tuple[str, torch.dtype, int]], checksums: Sequence[int]
) -> bytes:
    """The first bytes of a file with these labels, dtypes and numbers of elements, in that order.

    Their number doesn't hang on the tensors' CRC-32s, which may be given as zeros first.

    Raises:
        ValueError: a label comes twice, or a dtype has no name in the format.
    """
    header: dict[str, object] = {
        METADATA: {CHECKSUMS: " ".join(f"{each:08x}" for each in checksums)}
    }
    end = 0
    for label, dtype, numel in tensors:
        if label in header:
            raise ValueError(f"{label} is saved twice")
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"{label} is {dtype}, which a checkpoint can't hold")
        start, end = end, end + numel * dtype.itemsize
        header[label] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": [numel],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces up to a block of the disk; readers take them for JSON.
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(file: Path, *, nbytes: int, crc32: int) -> list[Entry]:
    """The tensors of a file that shall have that many bytes, in the order in which they lie there.

    Raises:
        CheckpointError: its size or its header's CRC-32 is another, or `write_header` can't have
            written it.
    """
    head = _read_head(file, nbytes)
    if zlib.crc32(head) != crc32:
        raise CheckpointError(f"{file} has a damaged header: it is not what its CRC-32 says")
    try:
        header = json.loads(head[LENGTH_BYTES:])
        metadata = header.pop(METADATA, None)
        entries = [_entry(label, fields, len(head)) for label, fields in header.items()]
        if metadata is not None:
            entries = _with_checksums(entries, metadata[CHECKSUMS].split())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} has a damaged header: {error!r}"[:300]) from error
    _check_positions(file, entries, data=len(head), size=nbytes)
    return entries


def _read_head(file: Path, nbytes: int) -> bytes:
    try:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        size = file.stat().st_size
        if size != nbytes:
            raise CheckpointError(f"{file} has {size:,} bytes instead of {nbytes:,}")
        with file.open("rb") as opened:
            head = opened.read(LENGTH_BYTES)
            length = int.from_bytes(head, "little")
            if length > min(MAX_BYTES, size - LENGTH_BYTES):
                raise CheckpointError(f"{file} is not a safetensors file: it has no header")
            return head + opened.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror or error}") from error


def _entry(label: str, fields: Mapping[str, Any], data: int) -> Entry:
    (numel,), (start, stop) = fields["shape"], fields["data_offsets"]
    if not all(type(value) is int and value >= 0 for value in (numel, start, stop)):
        raise ValueError(f"{label} lies nowhere")
    dtype = DTYPES.get(fields["dtype"])
    if dtype is None:
        raise ValueError(f"{label} has the unknown number format {fields['dtype']}")
    entry = Entry(label=label, dtype=dtype, numel=numel, position=data + start)
    if entry.nbytes != stop - start:
        raise ValueError(f"{label} has {stop - start} bytes for {numel} numbers")
    return entry


def _with_checksums(entries: Sequence[Entry], checksums: Sequence[str]) -> list[Entry]:
    pairs = zip(entries, checksums, strict=True)
    return [replace(entry, crc32=int(checksum, 16)) for entry, checksum in pairs]


def _check_positions(file: Path, entries: Sequence[Entry], *, data: int, size: int) -> None:
    """Every byte after the header belongs to one tensor."""
    stops = [data, *(entry.position + entry.nbytes for entry in entries)]
    starts = [*(entry.position for entry in entries), size]
    for stop, start in zip(stops, starts, strict=True):
        if stop != start:
            raise CheckpointError(
                f"{file} has a damaged header: a tensor ends at byte {stop} and the next one,"
                f" or the file, is at {start}"
            )
