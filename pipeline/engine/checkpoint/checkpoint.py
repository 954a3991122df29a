"""A checkpoint that is there: any elements of any tensor in it, to any process."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.engine.checkpoint.header import DTYPE_NAMES, Entry, read_header
from pipeline.engine.checkpoint.layout import Columns, file_name, parse_label
from pipeline.engine.checkpoint.manifest import Manifest, StoredFile, StoredFragment
from pipeline.engine.checkpoint.verify import Checked, verify_fragments
from pipeline.errors import CheckpointError
from pipeline.files.tensor_io import bytes_of, read_at

CHUNK_BYTES = 16 * 2**20
"""Of host memory, where elements can't be read straight to where they shall go."""

ELEMENTS_AT_ONCE = 2**21
"""Elements of a fragment of columns that are in memory between file and their places."""


@dataclass(frozen=True)
class _Stored:
    """One fragment: elements `start` to `stop` of its tensor, from a position of a file on."""

    file: Path
    entry: Entry
    crc32: int
    start: int
    stop: int

    columns: Columns | None
    """Of the tensor, whose elements they are; None counts all of it."""

    def to_check(self) -> Checked:
        """What `verify_fragments` checks."""
        entry = self.entry
        return Checked(self.file, entry.label, entry.position, entry.nbytes, self.crc32)


class Checkpoint:
    """What the manifest and the files' headers say; elements are read when they are asked for.

    Several threads and processes may read at once.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        base: "Checkpoint | None",
        first: str | None,
        near: Mapping[str, Path],
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.base = base
        self._near = near
        self._of_file: dict[str, list[_Stored]] = {}
        self._fragments: dict[str, list[_Stored]] = {}
        """By the tensors' names, of the files whose headers have been read."""
        self._is_whole = False
        self._loading = threading.Lock()
        if first is not None and first in manifest.files:
            self._index([first])

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        rank: int | None = None,
        near: Mapping[str, Mapping[str, Path]] | None = None,
    ) -> "Checkpoint":
        """The checkpoint in that directory: its manifest, its headers, its files' sizes.

        With a `rank` only what that process wrote; the other files' headers are read where
        something is asked for that isn't there. So in a job of as many processes as have written it
        nobody reads every header; `verify` by all shares reads each. `near` has copies of files on
        this machine, by the attempt that wrote them and their names, which are read in their place.

        Raises:
            CheckpointError: one of them is missing, damaged or not what the manifest says, or a
                tensor has a gap or an overlap.
        """
        manifest = Manifest.read(path)
        base = None
        if manifest.base is not None:
            base = cls.open(path.parent / manifest.base, rank=rank)
        first = None if rank is None else file_name(rank, len(manifest.files))
        copies = (near or {}).get(manifest.attempt, {})
        checkpoint = cls(path, manifest, base, first, copies)
        if rank is None:
            checkpoint._whole()  # of this class
        return checkpoint

    @property
    def step(self) -> int:
        """The optimizer step after which it was saved."""
        return self.manifest.step

    @property
    def state(self) -> Mapping[str, Any]:
        """What `save` was given as the document."""
        return self.manifest.state

    @property
    def world_size(self) -> int:
        """Processes that wrote it."""
        return len(self.manifest.files)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, those of the base included."""
        own = (piece.entry.nbytes for pieces in self._whole().values() for piece in pieces)
        return sum(own) + (self.base.nbytes if self.base else 0)

    def keys(self) -> list[str]:
        """The tensors' names, those of the base included."""
        return [*self._whole(), *(self.base.keys() if self.base else ())]

    def holds(self, key: str) -> bool:
        """Whether it has a tensor of that name."""
        there = key in self._fragments or key in self._whole()
        return there or (self.base is not None and self.base.holds(key))

    def written_alone(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose names begin so, by the rest of them; one process wrote all, each whole.

        Raises:
            CheckpointError: a file can't be read.
        """
        own = {name for name in self._fragments if name.startswith(prefix)}
        names = own or {name for name in self._whole() if name.startswith(prefix)}
        found: dict[str, Tensor] = {}
        for name in sorted(names):
            (piece,) = self._fragments[name]
            found[name.removeprefix(prefix)] = torch.empty(piece.stop, dtype=piece.entry.dtype)
            _read(piece, 0, found[name.removeprefix(prefix)])
        return found

    def numel(self, key: str) -> int:
        """Elements of one tensor."""
        return max(_end(piece) for piece in self._pieces(key))

    def dtype(self, key: str) -> torch.dtype:
        """The number format that one tensor is stored in."""
        return self._pieces(key)[0].entry.dtype

    def read(self, key: str, start: int, out: Tensor) -> None:
        """Fill the flat `out` with the elements from `start` on, converted to its dtype.

        Raises:
            CheckpointError: a file can't be read.
        """
        stop = start + out.numel()
        pieces = self._covering(key, start, stop)
        if out.ndim != 1 or pieces is None:
            raise ValueError(
                f"{key} with {self.numel(key)} elements can't fill {tuple(out.shape)} from {start}"
            )
        out = out.detach()
        for piece in pieces:
            if piece.columns is not None:
                _read_columns(piece, piece.columns, start, out)
                continue
            begin, end = max(start, piece.start), min(stop, piece.stop)
            if begin < end:
                _read(piece, begin - piece.start, out[begin - start : end - start])

    def verify(self, *, share: int = 0, shares: int = 1) -> None:
        """Read the fragments, all or this one of that many equal shares, and compare their CRCs.

        Raises:
            CheckpointError: a file can't be read, or a fragment is not what was saved.
        """
        checkpoints = [self, *([self.base] if self.base else [])]
        files = [
            (checkpoint, name, stored.nbytes)
            for checkpoint in checkpoints
            for name, stored in checkpoint.manifest.files.items()
        ]
        total = sum(nbytes for *_, nbytes in files)
        start, stop = (total * each // shares for each in (share, share + 1))
        mine: list[Checked] = []
        done = 0
        for checkpoint, name, nbytes in files:
            if done < stop and done + nbytes > start:
                mine += [
                    piece.to_check()
                    for piece in checkpoint._pieces_of(name)  # noqa: SLF001  # of this class
                    if start <= done + piece.entry.position < stop
                ]
            done += nbytes
        verify_fragments(mine)

    def _pieces(self, key: str) -> list[_Stored]:
        pieces = self._whole().get(key)
        if pieces is not None:
            return pieces
        if self.base is not None:
            return self.base._pieces(key)  # noqa: SLF001  # of this class
        raise CheckpointError(f"{self.path} holds no {key}")

    def _covering(self, key: str, start: int, stop: int) -> list[_Stored] | None:
        """Fragments that have all of these elements; None where the tensor has fewer."""
        own = self._fragments.get(key, [])
        if self.base is not None and not own:
            own = self.base._fragments.get(key, [])  # noqa: SLF001  # of this class
        if _cover(own, start, stop):
            return own
        pieces = self._pieces(key)  # without a gap
        return pieces if 0 <= start <= stop <= max(map(_end, pieces)) else None

    def _pieces_of(self, name: str) -> list[_Stored]:
        """The pieces of one file, whose header is read once."""
        if name not in self._of_file:
            file = self._near.get(name, self.path / name)
            self._of_file[name] = _open_file(file, self.manifest.files[name])
        return self._of_file[name]

    def _index(self, names: Iterable[str]) -> None:
        fragments: dict[str, list[_Stored]] = {}
        for name in names:
            for fragment in self._pieces_of(name):
                key = fragment.entry.label.rpartition("|")[0]
                fragments.setdefault(key, []).append(fragment)
        self._fragments = fragments

    def _whole(self) -> Mapping[str, list[_Stored]]:
        """The fragments of all files, by the tensors' names."""
        with self._loading:
            if not self._is_whole:
                self._index(self.manifest.files)
                for key, pieces in self._fragments.items():
                    if any(each.columns is not None for each in pieces):
                        _check_columns(self.path, key, pieces)
                    else:
                        _check_cover(self.path, key, pieces)
                if self.base is not None:
                    twice = self._fragments.keys() & set(self.base.keys())
                    if twice:
                        raise CheckpointError(
                            f"{min(twice)} is both in {self.path} and in {self.base.path}"
                        )
                self._is_whole = True
        return self._fragments


def _cover(pieces: Sequence[_Stored], start: int, stop: int) -> bool:
    """Whether elements `start` to `stop` are in the pieces, of which no two have one in common.

    Some columns alone have never all elements of a row.
    """
    if any(piece.columns is not None for piece in pieces):
        return False
    shared = (min(stop, piece.stop) - max(start, piece.start) for piece in pieces)
    there = any(piece.start <= start <= piece.stop for piece in pieces)
    return 0 <= start <= stop and there and sum(each for each in shared if each > 0) == stop - start


def _open_file(file: Path, stored: StoredFile) -> list[_Stored]:
    entries = read_header(file, nbytes=stored.nbytes, crc32=stored.header_crc32)
    if stored.fragments is not None:
        entries = _of_first_format(file, entries, stored.fragments)
    fragments: list[_Stored] = []
    for entry in entries:
        parsed = parse_label(entry.label)
        if parsed is None or parsed.stop - parsed.start != entry.numel:
            raise CheckpointError(f"{file} has {entry.label!r}, which is not a name of a fragment")
        if entry.crc32 is None:
            raise CheckpointError(f"{file} lacks the CRC-32 of {entry.label}")
        fragments.append(
            _Stored(file, entry, entry.crc32, parsed.start, parsed.stop, parsed.columns)
        )
    return fragments


def _of_first_format(
    file: Path, entries: Sequence[Entry], stored: Mapping[str, StoredFragment]
) -> list[Entry]:
    """The entries with their CRC-32s, which the manifest had."""
    stored_types = {label: fragment.dtype for label, fragment in stored.items()}
    if stored_types != {entry.label: DTYPE_NAMES[entry.dtype] for entry in entries}:
        raise CheckpointError(f"{file} holds other fragments than the manifest says")
    return [replace(entry, crc32=stored[entry.label].crc32) for entry in entries]


def _end(piece: _Stored) -> int:
    """Where the tensor of a fragment that is its last one ends."""
    if piece.columns is None:
        return piece.stop
    return -(-piece.stop // piece.columns.run) * piece.columns.stride


def _check_columns(path: Path, key: str, pieces: list[_Stored]) -> None:
    """Whether columns stand side by side, and the fragments of each cover as many whole rows."""
    by_columns: dict[Columns | None, list[_Stored]] = {}
    for piece in pieces:
        by_columns.setdefault(piece.columns, []).append(piece)
    ends: set[int] = set()
    column = 0
    for columns in sorted(by_columns, key=lambda each: each or Columns(0, 0, 0)):
        _check_cover(path, f"{key} {columns or 'as a whole'}", by_columns[columns])
        if columns is None or columns.offset != column:
            raise CheckpointError(f"{key} in {path}: its columns don't stand side by side")
        column += columns.run
        last = max(piece.stop for piece in by_columns[columns])
        ends.add(_end(by_columns[columns][-1]) if last % columns.run == 0 else -1)
    strides = {piece.columns.stride for piece in pieces if piece.columns is not None}
    if len(ends) > 1 or -1 in ends or strides != {column}:
        raise CheckpointError(f"{key} in {path}: its columns are not of the same rows")


def _check_cover(path: Path, key: str, pieces: list[_Stored]) -> None:
    """Put the fragments of a tensor in order: without a gap, an overlap or a change of dtype."""
    pieces.sort(key=lambda piece: (piece.start, piece.stop))
    if len({piece.entry.dtype for piece in pieces}) > 1:
        raise CheckpointError(f"{key} in {path} has several number formats")
    position = 0
    for piece in pieces:
        if piece.start == piece.stop:
            continue
        if piece.start != position:
            what = "are missing" if piece.start > position else "are there twice"
            first, last = sorted((position, piece.start))
            raise CheckpointError(f"{key} in {path}: elements {first} to {last} {what}")
        position = piece.stop
    end = max(piece.stop for piece in pieces)
    if position != end:
        raise CheckpointError(f"{key} in {path}: elements {position} to {end} are missing")


def _read_columns(piece: _Stored, columns: Columns, start: int, out: Tensor) -> None:
    """Write what a fragment of columns has of the elements from `start` on to their places."""
    offset, run, stride = columns

    def before(element: int) -> int:
        """Elements of the columns before one of the tensor."""
        return element // stride * run + min(max(element % stride - offset, 0), run)

    first = max(piece.start, before(start))
    last = min(piece.stop, before(start + out.numel()))
    for low in range(first, last, ELEMENTS_AT_ONCE):
        high = min(low + ELEMENTS_AT_ONCE, last)
        values = torch.empty(high - low, dtype=out.dtype)
        _read(piece, low - piece.start, values)
        number = torch.arange(low, high)
        places = number // run * stride + offset + number % run - start
        out[places.to(out.device)] = values.to(out.device)


def _read(piece: _Stored, offset: int, out: Tensor) -> None:
    """Elements of one fragment from `offset` on."""
    dtype = piece.entry.dtype
    position = piece.entry.position + offset * dtype.itemsize
    straight = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
    step = out.numel() if straight else max(1, CHUNK_BYTES // dtype.itemsize)
    try:
        with piece.file.open("rb", buffering=0) as file:
            for target in out.split(step):
                chunk = target if straight else torch.empty(target.numel(), dtype=dtype)
                read_at(file.fileno(), [bytes_of(chunk)], position)
                position += chunk.nbytes
                if not straight:
                    target.copy_(chunk)
    except (OSError, EOFError) as error:
        raise CheckpointError(
            f"{piece.entry.label} can't be read from {piece.file}: {_reason(error)}"
        ) from error


def _reason(error: OSError | EOFError) -> str:
    return getattr(error, "strerror", None) or str(error)
