r"""Memory-mapped token files: Megatron's X.bin and X.idx, and Modalities' X.pbin (read-only).

X.bin holds the tokens, X.idx the position of the documents:

    magic "MMIDIDX\0\0" | version u64 (1) | code of the token type u8 | sequences u64
    | documents + 1 u64 | lengths in tokens i32 each | offsets in bytes i64 each
    | first sequence of each document i64 each, and the number of sequences

Source: `IndexedDataset` of Megatron-Core; modes, which may follow, are ignored. Files written here
also have X.json (tokenizer and sources) and X.sha256 (checksums, as `sha256sum` writes them).
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.modalities import read_modalities
from pipeline.files.durable import rename_durably, sync_file
from pipeline.system.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
SMALL_VOCABULARY = 65500
"""Megatron stores u16 below this size, otherwise i32."""

CHUNK = 2**14
"""Documents processed at a time."""

_HEADER = struct.Struct("<9sQBQQ")


@dataclass(frozen=True)
class Origin:
    """Tokenizer and sources of a token file, the content of X.json."""

    tokenizer: str
    """Name or directory of the tokenizer."""

    tokenizer_hash: str
    """SHA-256 of the tokenizer's definition, hexadecimal."""

    vocabulary: int
    """Every id is below this number."""

    eos: int
    """The id that ends every document."""

    sources: int
    """Number of source files."""

    bad_rows: int = 0
    """Rows that were skipped."""


class TokenFile:
    """Documents of one token file.

    Args:
        path: X.pbin, X.bin, X.idx or the prefix X.

    Raises:
        DataError: the file is missing, truncated, empty or of another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = without_suffix(Path(path))
        self.origin: Origin | None = None
        try:
            if self.path.suffix == ".pbin":
                self._open_modalities()
            else:
                self._open_megatron()
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"token file {self.path} can't be read: {error}") from error
        self.documents = len(self._firsts) - 1
        if not self.documents or not len(self.ids):
            raise DataError(f"{self.path} has no documents; pack it again")

    def _open_megatron(self) -> None:
        index, data = index_path(self.path), data_path(self.path)
        with index.open("rb") as file:
            head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(MAGIC):
            raise DataError(f"{index} is not an index of a Megatron file; pack the texts again")
        _, version, code, sequences, firsts = _HEADER.unpack(head)
        if version != 1 or code not in TYPES:
            raise DataError(f"{index} has the unknown version {version} or token type {code}")
        if not sequences or firsts < 2:
            raise DataError(f"{self.path} has no documents; pack it again")
        self.dtype = np.dtype(TYPES[code])
        self._maps = [_map(index), _map(data)]
        content, size = self._maps[0], data.stat().st_size
        begin = _HEADER.size
        if len(content) < begin + 12 * sequences + 8 * firsts or size % self.dtype.itemsize:
            raise DataError(f"{index} or {data} was not copied whole; copy both again")
        self.lengths = np.frombuffer(content, "<i4", sequences, begin)
        self.offsets = np.frombuffer(content, "<i8", sequences, begin + 4 * sequences)
        self._firsts = np.frombuffer(content, "<i8", firsts, begin + 12 * sequences)
        self.ids = np.frombuffer(self._maps[1], self.dtype)
        end = int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if end != size or self._firsts[0] != 0 or self._firsts[-1] != sequences:
            raise DataError(f"{index} does not match {data}; copy both again")
        if (about := origin_path(self.path)).exists():
            self.origin = Origin(**json.loads(about.read_bytes()))

    def _open_modalities(self) -> None:
        content = _map(self.path)
        self._maps = [content]
        self.ids, self.offsets, self.lengths = read_modalities(self.path, content)
        self.dtype = self.ids.dtype
        self._firsts = np.arange(len(self.offsets) + 1)

    def begins(self, first: int, last: int) -> NDArray[np.int64]:
        """First tokens of documents `first` to `last`; document `documents` begins at the end."""
        sequences = self._firsts[first:last]
        last_sequence = len(self.offsets) - 1
        begins = self.offsets[np.minimum(sequences, last_sequence)] // self.dtype.itemsize
        return np.where(sequences > last_sequence, len(self.ids), begins)

    def span(self, document: int) -> tuple[int, int]:
        """Positions of a document's first token and of the one after its last.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= document < self.documents:
            raise IndexError(f"{self.path} has {self.documents:,} documents, not {document}")
        start, end = self.begins(document, document + 2).tolist()
        return start, end

    def tokens(self, document: int) -> NDArray[Any]:
        """Tokens of a document, a read-only view.

        Raises:
            IndexError: there is no such document.
        """
        return self.slice(*self.span(document))

    def slice(self, start: int, end: int) -> NDArray[Any]:
        """Tokens `start` to `end` of the concatenated documents, a read-only view."""
        return self.ids[start:end]

    def document_at(self, token: int) -> int:
        """Number of the document that contains a token."""
        offset = token * self.dtype.itemsize
        sequence = np.searchsorted(self.offsets, offset, side="right") - 1
        return int(np.searchsorted(self._firsts, sequence, side="right")) - 1

    def chunks(self) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Tokens and lengths of consecutive documents, in the order of the file."""
        for first in range(0, self.documents, CHUNK):
            begins = self.begins(first, min(first + CHUNK, self.documents) + 1)
            yield self.slice(int(begins[0]), int(begins[-1])), np.diff(begins)
            self.release()

    def fingerprint(self) -> str:
        """Checksums of the content, or size and time of the file where there are none."""
        checksums = checksum_path(self.path)
        if checksums.exists():
            return " ".join(line.split()[0] for line in checksums.read_text().splitlines())
        stat = (self.path if self.path.suffix == ".pbin" else data_path(self.path)).stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"

    def release(self) -> None:
        """Drop the pages read so far from memory; the system reads them again on access."""
        for content in self._maps:
            content.madvise(mmap.MADV_DONTNEED)


class TokenWriter:
    """Writer of X.bin and X.idx, with one sequence per document.

    Nothing has its final name before `finish`. Four bytes per document are kept in memory.
    """

    def __init__(self, prefix: Path, dtype: "np.dtype[Any]") -> None:
        self.prefix, self.dtype = prefix, dtype
        self._lengths: list[NDArray[np.int32]] = []
        self._digest = hashlib.sha256()
        self._file = _temporary(data_path(prefix)).open("wb")
        self._finished = False

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()
        for path in self._paths():
            _temporary(path).unlink(missing_ok=True)

    def append(self, ids: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Append documents.

        Args:
            ids: concatenated tokens.
            lengths: tokens of each document.
        """
        content = np.ascontiguousarray(ids, self.dtype).data
        self._file.write(content)
        self._digest.update(content)
        if len(lengths) and lengths.max() >= 2**31:
            raise DataError(f"{self.prefix} would have a document of more than 2^31 tokens")
        self._lengths.append(lengths.astype("<i4"))

    def finish(self, origin: Origin | None) -> TokenFile:
        """Write the index, description and checksums, rename all files, and open the result."""
        data, index, about, checksums = self._paths()
        self._file.close()
        content = self._index()
        _temporary(index).write_bytes(content)
        lines = [f"{self._digest.hexdigest()}  {data.name}"]
        lines += [f"{hashlib.sha256(content).hexdigest()}  {index.name}"]
        _temporary(checksums).write_text("\n".join(lines) + "\n")
        written = [data, checksums, index]
        if origin is not None:
            _temporary(about).write_text(json.dumps(asdict(origin), indent=2) + "\n")
            written.insert(0, about)
        for path in written:  # the index last: with it the file is complete
            sync_file(_temporary(path))
        for path in written:
            rename_durably(_temporary(path), path)
        return TokenFile(self.prefix)

    def _index(self) -> bytes:
        lengths = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        code = next(code for code, name in TYPES.items() if np.dtype(name) == self.dtype)
        count = len(lengths)
        head = _HEADER.pack(MAGIC, 1, code, count, count + 1)
        offsets = ends - lengths.astype("<i8") * self.dtype.itemsize
        firsts = np.arange(count + 1, dtype="<i8")
        return b"".join((head, lengths.tobytes(), offsets.tobytes(), firsts.tobytes()))

    def _paths(self) -> list[Path]:
        names = data_path, index_path, origin_path, checksum_path
        return [name(self.prefix) for name in names]


def token_type(vocabulary: int) -> "np.dtype[Any]":
    """Type of the tokens of a vocabulary of this size."""
    return np.dtype(TYPES[8 if vocabulary < SMALL_VOCABULARY else 4])


def without_suffix(path: Path) -> Path:
    """The prefix X of X.bin or X.idx; other names are prefixes already."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def data_path(prefix: Path) -> Path:
    """The file of tokens."""
    return Path(f"{prefix}.bin")


def index_path(prefix: Path) -> Path:
    """The index."""
    return Path(f"{prefix}.idx")


def origin_path(prefix: Path) -> Path:
    """The description."""
    return Path(f"{prefix}.json")


def checksum_path(prefix: Path) -> Path:
    """The checksums."""
    return Path(f"{prefix}.sha256")


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.writing")


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
