"""Reads any range of elements of any tensor in a checkpoint."""

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.engine.checkpoint.format import Columns, Manifest, StoredFile, file_name, parse_label
from pipeline.files.safetensors_header import read_header
from pipeline.files.tensor_io import DTYPES, read_at, view_bytes
from pipeline.system.errors import CheckpointError, ModelError

CHUNK_BYTES = 16 * 2**20
"""Bytes read at once if elements can't be read directly into their destination."""

VERIFY_THREADS = 4
"""Number of threads that verify files; zlib and the system calls release the GIL."""


@dataclass(frozen=True)
class StoredFragment:
    """One fragment in a file."""

    file: Path
    position: int
    """Offset of the first byte in the file."""

    dtype: torch.dtype
    start: int
    stop: int

    columns: Columns | None
    """The columns to which `start` and `stop` refer; None if they refer to the full tensor."""

    @property
    def end(self) -> int:
        """End (exclusive) of the fragment in the full tensor; for columns, end of the last row."""
        if self.columns is None:
            return self.stop
        return -(-self.stop // self.columns.width) * self.columns.stride

    def overlap(self, start: int, stop: int) -> int:
        """Return how many elements are in [`start`, `stop`) of the tensor, or 0 for columns."""
        return max(0, min(stop, self.stop) - max(start, self.start)) if not self.columns else 0


_Index = dict[str, list[StoredFragment]]


class Checkpoint:
    """A checkpoint's manifest, and its tensors, which are read on request.

    Several threads and processes may read at the same time.
    """

    def __init__(
        self, path: Path, manifest: Manifest, base: "Checkpoint | None", rank: int
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.base = base
        self._rank_file = file_name(rank, len(manifest.files))
        self._file_indices: dict[str, _Index] = {}
        self._full_index: _Index | None = None

    @classmethod
    def open(cls, path: Path, *, rank: int = 0) -> "Checkpoint":
        """Open the checkpoint in a directory.

        The file that `rank` wrote is searched first, so that a job of the same size reads only
        one header per process.

        Raises:
            CheckpointError: the manifest is missing or damaged.
        """
        manifest = Manifest.read(path)
        base = None if manifest.base is None else cls.open(path.parent / manifest.base, rank=rank)
        return cls(path, manifest, base, rank)

    @property
    def step(self) -> int:
        """The optimizer step after which the state was saved."""
        return self.manifest.step

    @property
    def state(self) -> Mapping[str, Any]:
        """The run's state, as passed to `CheckpointWriter.save`."""
        return self.manifest.state

    @property
    def world_size(self) -> int:
        """Number of processes that wrote the checkpoint."""
        return len(self.manifest.files)

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes, including the base."""
        size = sum(file.nbytes for file in self.manifest.files.values())
        return size + (self.base.nbytes if self.base else 0)

    def keys(self) -> list[str]:
        """List the tensors' names, including those in the base."""
        return [*self._index(), *(self.base.keys() if self.base else ())]

    def numel(self, key: str) -> int:
        """Return the number of elements of one tensor."""
        return max(fragment.end for fragment in self._find_fragments(key))

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which one tensor is stored."""
        return self._find_fragments(key)[0].dtype

    def read(self, key: str, start: int, out: Tensor) -> None:
        """Fill the 1-D `out` with elements of `key` from index `start`, converted to `out.dtype`.

        Raises:
            CheckpointError: elements are missing, or a file can't be read.
        """
        out = out.detach()
        stop = start + out.numel()
        fragments = self._rank_index().get(key, [])
        if sum(fragment.overlap(start, stop) for fragment in fragments) < out.numel():
            fragments = self._find_fragments(key)
        filled = sum(_fill(fragment, start, out) for fragment in fragments)
        if filled != out.numel():
            raise CheckpointError(
                f"{self.path} has only {filled} of {out.numel()} elements of {key} starting at"
                f" {start}"
            )

    def read_prefix(self, prefix: str) -> dict[str, Tensor]:
        """Read the tensors whose names start with `prefix`, keyed by the rest of the name.

        If this rank's file has such tensors, those in other files are omitted.
        """
        names = [name for name in self._rank_index() if name.startswith(prefix)]
        names = names or [name for name in self._index() if name.startswith(prefix)]
        tensors: dict[str, Tensor] = {}
        for name in names:
            fragments = self._rank_index().get(name) or self._find_fragments(name)
            numel = max(fragment.end for fragment in fragments)
            tensor = torch.empty(numel, dtype=fragments[0].dtype)
            self.read(name, 0, tensor)
            tensors[name.removeprefix(prefix)] = tensor
        return tensors

    def verify(self, *, shard: int = 0, num_shards: int = 1) -> None:
        """Verify the CRC-32 of every file, or of every `num_shards`-th file, starting at `shard`.

        Raises:
            CheckpointError: a file is missing, can't be read or is damaged.
        """
        checkpoints = [self, *([self.base] if self.base else [])]
        files = [
            (checkpoint.path / name, stored)
            for checkpoint in checkpoints
            for name, stored in checkpoint.manifest.files.items()
        ]
        with ThreadPoolExecutor(VERIFY_THREADS, thread_name_prefix="verify") as threads:
            for _ in threads.map(_verify, files[shard::num_shards]):
                pass

    def _find_fragments(self, key: str) -> list[StoredFragment]:
        fragments = self._index().get(key)
        if fragments is not None:
            return fragments
        if self.base is not None:
            return self.base._find_fragments(key)  # noqa: SLF001  # an instance of this class
        raise CheckpointError(f"{self.path} has no {key}")

    def _rank_index(self) -> _Index:
        """Index the fragments in the file that this rank wrote, by tensor name."""
        name = self._rank_file
        return self._file_index(name) if name in self.manifest.files else {}

    def _index(self) -> _Index:
        """Index the fragments in all files, by tensor name."""
        if self._full_index is None:
            index: _Index = {}
            for name in self.manifest.files:
                for key, fragments in self._file_index(name).items():
                    index.setdefault(key, []).extend(fragments)
            self._full_index = index
        return self._full_index

    def _file_index(self, name: str) -> _Index:
        if name not in self._file_indices:
            stored = self.manifest.files[name]
            self._file_indices[name] = _read_index(self.path / name, stored)
        return self._file_indices[name]


def _read_index(file: Path, stored: StoredFile) -> _Index:
    _check_size(file, stored)
    index: _Index = {}
    try:
        tensors = read_header(file)
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    for name, tensor in tensors.items():
        label = parse_label(name)
        if label is None or tensor.dtype not in DTYPES:
            raise CheckpointError(f"{file} contains {name!r}, which is not a fragment")
        key, start, stop, columns = label
        dtype = DTYPES[tensor.dtype]
        fragment = StoredFragment(file, tensor.offset, dtype, start, stop, columns)
        index.setdefault(key, []).append(fragment)
    return index


def _check_size(file: Path, stored: StoredFile) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file} is missing: {error.strerror}") from error
    if size != stored.nbytes:
        raise CheckpointError(f"{file} has {size:,} bytes instead of {stored.nbytes:,}")


def _verify(named: tuple[Path, StoredFile]) -> None:
    path, stored = named
    _check_size(path, stored)
    crc32 = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                crc32 = zlib.crc32(chunk, crc32)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    if crc32 != stored.crc32:
        raise CheckpointError(f"{path} is damaged: CRC-32 mismatch")


def _fill(fragment: StoredFragment, start: int, out: Tensor) -> int:
    """Fill `out`, which begins at `start`, with the fragment's elements; return their number."""
    if fragment.columns is not None:
        return _fill_columns(fragment, fragment.columns, start, out)
    begin, end = max(start, fragment.start), min(start + out.numel(), fragment.stop)
    if begin >= end:
        return 0
    _read(fragment, begin - fragment.start, out[begin - start : end - start])
    return end - begin


def _fill_columns(fragment: StoredFragment, columns: Columns, start: int, out: Tensor) -> int:
    first = max(fragment.start, columns.count_before(start))
    last = min(fragment.stop, columns.count_before(start + out.numel()))
    step = CHUNK_BYTES // out.element_size()
    for low in range(first, last, step):
        high = min(low + step, last)
        values = torch.empty(high - low, dtype=out.dtype)
        _read(fragment, low - fragment.start, values)
        positions = columns.positions(low, high) - start
        out[positions.to(out.device)] = values.to(out.device)
    return max(0, last - first)


def _read(fragment: StoredFragment, offset: int, out: Tensor) -> None:
    """Read elements of one fragment, starting at `offset`."""
    dtype = fragment.dtype
    position = fragment.position + offset * dtype.itemsize
    direct = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
    step = out.numel() if direct else CHUNK_BYTES // dtype.itemsize
    try:
        with fragment.file.open("rb", buffering=0) as file:
            for target in out.split(step):
                chunk = target if direct else torch.empty(target.numel(), dtype=dtype)
                read_at(file.fileno(), view_bytes(chunk), position)
                position += chunk.nbytes
                if not direct:
                    target.copy_(chunk)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{fragment.file} can't be read: {reason}") from error
