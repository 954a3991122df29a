"""A checkpoint that is there: any elements of any tensor in it, to any process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.engine.checkpoint.header import DTYPE_NAMES, Entry, read_header
from pipeline.engine.checkpoint.layout import Columns, parse_label
from pipeline.engine.checkpoint.manifest import Manifest, StoredFile
from pipeline.engine.checkpoint.verify import Checked, verify_fragments
from pipeline.errors import CheckpointError
from pipeline.files.tensor_io import bytes_of, read_at

CHUNK_BYTES = 16 * 2**20
"""Of host memory, where elements can't be read straight to where they shall go."""

ELEMENTS_AT_ONCE = 2**21
"""Of a fragment of columns, between file and their places."""


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


class Checkpoint:
    """What the manifest and the files' headers say; elements are read when they are asked for.

    Several threads and processes may read at once.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        fragments: Mapping[str, list[_Stored]],
        base: "Checkpoint | None",
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.base = base
        self._fragments = fragments

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """The checkpoint in that directory: its manifest, its headers, its files' sizes.

        Raises:
            CheckpointError: one of them is missing, damaged or not what the manifest says, or a
                tensor has a gap or an overlap.
        """
        manifest = Manifest.read(path)
        fragments: dict[str, list[_Stored]] = {}
        for name, stored in manifest.files.items():
            for fragment in _open_file(path / name, stored):
                key = fragment.entry.label.rpartition("|")[0]
                fragments.setdefault(key, []).append(fragment)
        for key, pieces in fragments.items():
            if any(each.columns is not None for each in pieces):
                _check_columns(path, key, pieces)
            else:
                _check_cover(path, key, pieces)
        base = None
        if manifest.base is not None:
            base = cls.open(path.parent / manifest.base)
            twice = fragments.keys() & set(base.keys())
            if twice:
                raise CheckpointError(f"{min(twice)} is both in {path} and in {base.path}")
        return cls(path, manifest, fragments, base)

    @property
    def step(self) -> int:
        """After which it was saved."""
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
        """Of all tensors, those of the base included."""
        return sum(piece.nbytes for piece in self._everything())

    def keys(self) -> list[str]:
        """The tensors' names, those of the base included."""
        return [*self._fragments, *(self.base.keys() if self.base else ())]

    def holds(self, key: str) -> bool:
        """Whether it has a tensor of that name."""
        return key in self._fragments or (self.base is not None and self.base.holds(key))

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
        if out.ndim != 1 or not 0 <= start <= stop <= self.numel(key):
            raise ValueError(
                f"{key} with {self.numel(key)} elements can't fill {tuple(out.shape)} from {start}"
            )
        out = out.detach()
        for piece in self._pieces(key):
            if piece.columns is not None:
                _read_columns(piece, piece.columns, start, out)
                continue
            begin, end = max(start, piece.start), min(stop, piece.stop)
            if begin < end:
                _read(piece, begin - piece.start, out[begin - start : end - start])

    def verify(self, *, share: int = 0, shares: int = 1) -> None:
        """Read the fragments, all or this one of so many equal shares, and compare their CRCs.

        Raises:
            CheckpointError: a file can't be read, or a fragment is not what was saved.
        """
        everything = sorted(self._everything(), key=lambda piece: (piece.file, piece.position))
        total = max(1, sum(piece.nbytes for piece in everything))
        mine: list[Checked] = []
        done = 0
        for piece in everything:
            if min(done * shares // total, shares - 1) == share:
                mine.append(piece)
            done += piece.nbytes
        verify_fragments(mine)

    def _pieces(self, key: str) -> list[_Stored]:
        if key in self._fragments:
            return self._fragments[key]
        if self.base is not None:
            return self.base._pieces(key)  # noqa: SLF001  # of this class
        raise CheckpointError(f"{self.path} holds no {key}")

    def _everything(self) -> list[Checked]:
        mine = [
            Checked(
                file=piece.file,
                label=piece.entry.label,
                position=piece.entry.position,
                nbytes=piece.entry.nbytes,
                crc32=piece.crc32,
            )
            for pieces in self._fragments.values()
            for piece in pieces
        ]
        return mine + (self.base._everything() if self.base else [])  # noqa: SLF001


def _open_file(file: Path, stored: StoredFile) -> list[_Stored]:
    entries = read_header(file, nbytes=stored.nbytes, crc32=stored.header_crc32)
    stored_types = {label: fragment.dtype for label, fragment in stored.fragments.items()}
    if stored_types != {entry.label: DTYPE_NAMES[entry.dtype] for entry in entries}:
        raise CheckpointError(f"{file} holds other fragments than the manifest says")
    fragments: list[_Stored] = []
    for entry in entries:
        parsed = parse_label(entry.label)
        if parsed is None or parsed.stop - parsed.start != entry.numel:
            raise CheckpointError(f"{file} has {entry.label!r}, which is no name of a fragment")
        crc32 = stored.fragments[entry.label].crc32
        fragments.append(_Stored(file, entry, crc32, parsed.start, parsed.stop, parsed.columns))
    return fragments


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
