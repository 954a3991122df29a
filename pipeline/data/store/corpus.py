"""The files of a corpus, and the documents that are held out.

Whether a document is held out depends only on a hash of its first tokens and on `data.seed`, so
either all copies of a document are held out or none are, and enlarging the corpus moves none.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from glob import glob
from pathlib import Path

from pipeline.config import TextDataConfig
from pipeline.data.rows.sources import split_weight
from pipeline.data.sharing.prompts import draw
from pipeline.data.store.token_file import TokenFile, part_path
from pipeline.system.errors import DataError

HASHED_TOKENS = 4096
"""Number of leading tokens of a document that its hash covers."""


@dataclass(frozen=True)
class CorpusPath:
    """The token files that a data path names."""

    weight: float | None
    files: tuple[Path, ...]


def find_paths(data: TextDataConfig) -> list[CorpusPath]:
    """Find the files of `data.path`.

    Raises:
        DataError: a path doesn't exist, or is a directory or a file of another kind.
    """
    if not data.path:
        raise DataError(f"data.path is empty; pass a token file, or {_HOW_TO_PACK}")
    return [_find(spec) for spec in data.path]


_HOW_TO_PACK = "create one from text with `python -m pipeline.data.store pack`"


def _find(spec: str) -> CorpusPath:
    name, weight = split_weight(spec)
    path = Path(name).expanduser()
    if path.is_dir():
        raise DataError(f"data.path {path} is a directory; list its files, as in '{path}/*.bin'")
    if part_path(path, "idx").exists():
        return CorpusPath(weight, (path,))
    names = [str(path)] if path.exists() else glob(str(path), recursive=True)  # noqa: PTH207
    if not names:
        raise DataError(f"data.path {name}: no such file")
    if not all(file.endswith((".bin", ".idx")) for file in names):
        raise DataError(
            f"data.path {name} is not a token file (Megatron's .bin and .idx); {_HOW_TO_PACK}"
        )
    return CorpusPath(weight, tuple(sorted({Path(file).with_suffix(".bin") for file in names})))


class HeldOut:
    """Held-out documents: those whose `draw` is at most `threshold`."""

    def __init__(self, *, seed: int, threshold: float = 0.0) -> None:
        self.seed, self.threshold = seed, threshold
        self.contains = lru_cache(maxsize=2**16)(self._contains)
        """Whether a document of a file is held out."""

    def _contains(self, file: TokenFile, document: int) -> bool:
        return self.draw(document_hash(file, document)) <= self.threshold

    def draw(self, hash_: int) -> float:
        """Return a uniform random number in (0, 1) that depends on the hash and the seed."""
        return draw(hash_, seed=self.seed, purpose="held out")


def document_hash(file: TokenFile, document: int) -> int:
    """Return a 64-bit hash of the document's first `HASHED_TOKENS` tokens."""
    start, end = file.span(document)
    ids = file.slice(start, min(end, start + HASHED_TOKENS)).astype("<u4")
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")
