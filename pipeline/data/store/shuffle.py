"""The documents of a token file in a random order, in memory that does not grow with the file.

Each document has a key, which follows from its number and the seed, and the order is that of the
keys. Documents are dealt out to files by the first bits of their keys until such a file fits into
memory; then it is sorted (a most-significant-digit radix sort).
"""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.documents import Documents, joined, parts_of
from pipeline.data.store.layout import RECORD_BYTES, Layout
from pipeline.data.store.marks import RECORD, Marks
from pipeline.data.store.reader import TokenFile
from pipeline.data.store.writer import TokenWriter

BITS = 8
"""Of the keys by which documents are dealt out at a time, to that many powers of two of files."""

BUCKET_BYTES = 16 * 2**20
"""Tokens that are sorted in memory; with places of them in the order it takes six times as much."""

BUFFER_BYTES = 64 * 2**10

Keys = NDArray[np.uint64]


def shuffle(file: TokenFile, out: Path, *, seed: int) -> Layout:
    """Write the documents of the file in the order that the seed gives, each block checked.

    It takes as much room again on the disk of `out` while it works.

    Raises:
        DataError: a block is damaged.
    """
    with TokenWriter(out, file.layout.width, marked=file.has_marks) as writer:
        try:
            with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as directory:
                size = file.layout.width * file.layout.tokens
                for documents in _sorted(_keyed(file, seed), size, Path(directory), BITS):
                    writer.append(documents.ids, documents.lengths, documents.marks)
            return writer.finish(file.origin)
        except BaseException:
            writer.discard()
            raise


def keys_of(numbers: NDArray[np.uint64], seed: int) -> Keys:
    """A key for each document, all of them different: SplitMix64's finalizer is a bijection."""
    digest = hashlib.blake2b(f"shuffle {seed}".encode(), digest_size=8).digest()
    keys = numbers + np.uint64(int.from_bytes(digest, "little"))  # modulo 2^64
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


Keyed = tuple[Keys, Documents]


def _keyed(file: TokenFile, seed: int) -> Iterator[Keyed]:
    for first, documents in parts_of(file):
        numbers = np.arange(first, first + len(documents.lengths), dtype=np.uint64)
        yield keys_of(numbers, seed), documents


def _sorted(source: Iterable[Keyed], size: int, directory: Path, bits: int) -> Iterator[Documents]:
    """The documents by their keys, which are the same but for what follows their first `bits`."""
    if size <= BUCKET_BYTES or bits > 64:
        parts = list(source)
        if parts:
            keys = np.concatenate([keys for keys, _ in parts])
            yield joined([documents for _, documents in parts]).chosen(np.argsort(keys))
        return
    for number, bucket in enumerate(_deal_out(source, directory, bits)):
        below = directory / str(number)
        below.mkdir()
        yield from _sorted(bucket.read(), bucket.path.stat().st_size, below, bits + BITS)
        bucket.path.unlink()


@dataclass(frozen=True)
class _Bucket:
    """Documents on the disk, in groups: numbers of documents and tokens, then all arrays."""

    path: Path
    dtype: "np.dtype[np.generic]"
    has_marks: bool

    def write(self, file: BinaryIO, keys: Keys, documents: Documents) -> None:
        sizes = np.array([len(keys), len(documents.ids)], np.int64)
        arrays = [sizes, keys, documents.lengths, documents.ids]
        if documents.marks is not None:
            arrays += [documents.marks.trained, documents.marks.records]
        for array in arrays:
            file.write(np.ascontiguousarray(array).view(np.uint8).data)

    def read(self) -> Iterator[Keyed]:
        with self.path.open("rb") as file:
            while len(head := file.read(16)) == 16:
                count, tokens = np.frombuffer(head, np.int64).tolist()
                keys = np.frombuffer(file.read(8 * count), np.uint64)
                lengths = np.frombuffer(file.read(8 * count), np.int64)
                ids = np.frombuffer(file.read(self.dtype.itemsize * tokens), self.dtype)
                marks = None
                if self.has_marks:
                    trained = np.frombuffer(file.read(tokens), np.bool_)
                    marks = Marks(trained, np.frombuffer(file.read(RECORD_BYTES * count), RECORD))
                yield keys, Documents(ids, lengths, marks)


def _deal_out(source: Iterable[Keyed], directory: Path, bits: int) -> list[_Bucket]:
    """Buckets of documents, by the last of the first `bits` bits of their keys, in that order."""
    buckets: dict[int, _Bucket] = {}
    files: dict[int, BinaryIO] = {}
    with ExitStack() as stack:
        for keys, documents in source:
            digits = (keys >> np.uint64(64 - bits)) & np.uint64(2**BITS - 1)
            for digit in np.unique(digits).tolist():
                if digit not in buckets:
                    path, has_marks = directory / f"{digit}.bucket", documents.marks is not None
                    buckets[digit] = _Bucket(path, documents.ids.dtype, has_marks)
                    file = path.open("wb", BUFFER_BYTES)
                    files[digit] = stack.enter_context(file)
                chosen = np.flatnonzero(digits == digit)
                buckets[digit].write(files[digit], keys[chosen], documents.chosen(chosen))
    return [buckets[digit] for digit in sorted(buckets)]
