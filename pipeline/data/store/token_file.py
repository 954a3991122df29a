r"""Memory-mapped token files: Megatron's X.bin and X.idx.

X.bin holds the tokens, X.idx the positions of the documents:

    magic "MMIDIDX\0\0" | version u64 (1) | code of the token type u8 | sequences u64
    | documents + 1 u64 | lengths in tokens i32 each | offsets in bytes i64 each
    | first sequence of each document i64 each, and the number of sequences

Reference: `IndexedDataset` in Megatron-Core; modes, which may follow, are ignored. Files written
here also have X.json (the tokenizer) and X.sha256 (checksums, as `sha256sum` writes them).
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.files.durable import rename_durably, sync
from pipeline.system.errors import DataError, counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
SMALL_VOCABULARY = 65500
"""Vocabulary size below which Megatron stores tokens as u16, otherwise as i32."""

CHUNK = 2**14
"""Number of documents processed at a time."""

_HEADER = struct.Struct("<9sQBQQ")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in the form that worker processes need."""

    name: str
    definition: str
    """JSON that `tokenizers` reads."""

    hash: str
    """SHA-256 of the definition and eos, in hexadecimal."""

    size: int
    """Every id is below this number."""

    eos: int


def read_vocabulary(tokenizer: "PreTrainedTokenizerBase", name: str) -> Vocabulary:
    """Read the definition of a tokenizer.

    Raises:
        DataError: the tokenizer is not fast, or has no end-of-sequence token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise DataError(
            f"the tokenizer {name} is not a fast tokenizer, which token files require; use one that"
            " has a tokenizer.json"
        )
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise DataError(f"the tokenizer {name} has no end-of-sequence token; choose another one")
    parts = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    definition = json.dumps(parts, sort_keys=True)
    digest = hashlib.sha256(f"{definition}\n{eos}".encode()).hexdigest()
    return Vocabulary(name, definition, digest, max(tokenizer.get_vocab().values()) + 1, eos)


@dataclass(frozen=True)
class Origin:
    """The tokenizer of a token file, as stored in X.json."""

    tokenizer: str
    """Name or directory of the tokenizer."""

    tokenizer_hash: str
    """SHA-256 of the tokenizer's definition and eos, in hexadecimal."""

    bad_rows: int = 0
    """Number of bad rows that were skipped."""


class TokenFile:
    """Documents of one token file, whose path is X.bin, X.idx or the prefix X.

    Raises:
        DataError: the file is missing, truncated, empty or in another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = without_suffix(Path(path))
        self.origin: Origin | None = None
        try:
            self._open_megatron()
        except DataError:
            raise
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"token file {self.path} can't be read: {error}") from error
        self.num_documents = len(self.starts) - 1

    def __str__(self) -> str:
        return f"{self.path}: {counted(self.num_documents, 'document')}, {len(self.ids):,} tokens"

    def _open_megatron(self) -> None:
        index, data = part_path(self.path, "idx"), part_path(self.path, "bin")
        content = index.read_bytes()
        if len(content) < _HEADER.size or not content.startswith(MAGIC):
            raise DataError(f"{index} is not a Megatron index; pack the texts again")
        _, version, code, num_sequences, num_documents = _HEADER.unpack_from(content)
        if version != 1 or code not in DTYPES:
            raise DataError(f"{index} has an unknown version ({version}) or token type ({code})")
        self.dtype = np.dtype(DTYPES[code])
        size = data.stat().st_size
        if len(content) < _HEADER.size + 12 * num_sequences + 8 * num_documents:
            raise DataError(f"{index} was not copied completely; copy it again")
        lengths = np.frombuffer(content, "<i4", num_sequences, _HEADER.size)
        offsets = np.frombuffer(content, "<i8", num_sequences, _HEADER.size + 4 * num_sequences)
        firsts = np.frombuffer(content, "<i8", num_documents, _HEADER.size + 12 * num_sequences)
        bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        expected = bounds[:-1] * self.dtype.itemsize
        is_dense = (lengths >= 0).all() and np.array_equal(offsets, expected)
        is_sorted = len(firsts) and (np.diff(firsts) >= 0).all() and firsts[0] == 0
        if not is_dense or not is_sorted or firsts[-1] != num_sequences:
            raise DataError(f"{index} has documents that are not consecutive; copy it again")
        if bounds[-1] * self.dtype.itemsize != size:
            raise DataError(f"{index} does not match {data}; copy both again")
        if not size:
            raise DataError(f"{self.path} has no tokens; pack it again")
        self.starts = bounds[firsts]
        self._mapping = _map_file(data)
        self.ids = np.frombuffer(self._mapping, self.dtype)
        if (origin_file := part_path(self.path, "json")).exists():
            self.origin = Origin(**json.loads(origin_file.read_bytes()))

    def span(self, document: int) -> tuple[int, int]:
        """Return the position of a document's first token, and the position after its last token.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= document < self.num_documents:
            raise IndexError(
                f"{self.path} has no document {document}; it has {self.num_documents:,} documents"
            )
        return int(self.starts[document]), int(self.starts[document + 1])

    def tokens(self, document: int) -> NDArray[Any]:
        """Return the tokens of a document as a read-only view.

        Raises:
            IndexError: there is no such document.
        """
        return self.slice(*self.span(document))

    def slice(self, start: int, end: int) -> NDArray[Any]:
        """Return tokens [`start`, `end`) of the concatenated documents as a read-only view."""
        return self.ids[start:end]

    def chunks(self) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Yield the tokens and lengths of consecutive documents, in file order."""
        for first in range(0, self.num_documents, CHUNK):
            starts = self.starts[first : first + CHUNK + 1]
            yield self.slice(int(starts[0]), int(starts[-1])), np.diff(starts)
            self.release()

    def fingerprint(self) -> str:
        """Return the checksums, or the file's size and modification time if there are none."""
        checksums = part_path(self.path, "sha256")
        if checksums.exists():
            return " ".join(line.split()[0] for line in checksums.read_text().splitlines())
        stat = part_path(self.path, "bin").stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"

    def release(self) -> None:
        """Drop the pages read so far from memory; they are read again on access."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


class TokenWriter:
    """Writer of X.bin and X.idx, with one sequence per document.

    Files get their final names in `finish`. Four bytes per document are kept in memory.
    """

    def __init__(self, prefix: Path, dtype: "np.dtype[Any]") -> None:
        self.prefix, self.dtype = prefix, dtype
        self._lengths: list[NDArray[Any]] = []
        self._digest = hashlib.sha256()
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._temporary_path("bin").open("wb")

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()
        for suffix in ("bin", "idx", "json", "sha256"):
            self._temporary_path(suffix).unlink(missing_ok=True)

    def append(self, ids: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Append documents, given their concatenated tokens and the length of each."""
        content = np.ascontiguousarray(ids, self.dtype).data
        self._file.write(content)
        self._digest.update(content)
        if len(lengths) and lengths.max() >= 2**31:
            raise DataError(f"{self.prefix} would have a document of 2^31 tokens or more")
        self._lengths.append(lengths.astype("<i4"))

    def finish(self, origin: Origin | None) -> TokenFile:
        """Write the index, origin and checksums, rename all files, and open the result."""
        self._file.close()
        index = self._build_index()
        digests = {"bin": self._digest, "idx": hashlib.sha256(index)}
        names = {suffix: part_path(self.prefix, suffix).name for suffix in digests}
        lines = [f"{digest.hexdigest()}  {names[suffix]}\n" for suffix, digest in digests.items()]
        self._temporary_path("sha256").write_text("".join(lines))
        self._temporary_path("idx").write_bytes(index)
        suffixes = ["bin", "sha256", "idx"]  # the index last: it marks the file as complete
        if origin is not None:
            self._temporary_path("json").write_text(json.dumps(asdict(origin), indent=2) + "\n")
            suffixes.insert(0, "json")
        for suffix in suffixes:
            sync(self._temporary_path(suffix))
        for suffix in suffixes:
            rename_durably(self._temporary_path(suffix), part_path(self.prefix, suffix))
        return TokenFile(self.prefix)

    def _build_index(self) -> bytes:
        lengths = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        code = next(code for code, dtype in DTYPES.items() if np.dtype(dtype) == self.dtype)
        count = len(lengths)
        header = _HEADER.pack(MAGIC, 1, code, count, count + 1)
        offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * self.dtype.itemsize
        firsts = np.arange(count + 1, dtype="<i8")
        return b"".join((header, lengths.tobytes(), offsets.tobytes(), firsts.tobytes()))

    def _temporary_path(self, suffix: str) -> Path:
        return part_path(self.prefix, f"{suffix}.writing")


def token_dtype(vocabulary_size: int) -> "np.dtype[Any]":
    """Return the token type for a vocabulary of this size."""
    return np.dtype(DTYPES[8 if vocabulary_size < SMALL_VOCABULARY else 4])


def without_suffix(path: Path) -> Path:
    """Remove the suffix of X.bin or X.idx; return other names unchanged."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def part_path(prefix: Path, suffix: str) -> Path:
    """Return the path of the token file (bin), index (idx), origin (json) or checksums (sha256)."""
    return Path(f"{prefix}.{suffix}")


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
