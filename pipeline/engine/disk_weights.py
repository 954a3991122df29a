"""Weights that live on a disk and visit memory to be gathered."""

from pathlib import Path

import torch
from jaxtyping import Shaped
from torch import Tensor

from pipeline.engine.buffers import BufferPool
from pipeline.engine.comm import Collectives
from pipeline.engine.store import TensorStore

BUFFERS = 3
"""Of one size: one that is read ahead, one that is gathered, one that others still read."""


class WeightDisk:
    """A scratch file for this process's pieces, and the buffers in which they visit memory.

    Raises:
        OffloadError: by any method, when the disk has failed.
    """

    def __init__(self, directory: Path, comm: Collectives) -> None:
        self.store = TensorStore(directory, rank=comm.group.global_rank)
        self.pool = BufferPool(comm, torch.device("cpu"))
        self._written: tuple[DiskPiece, Tensor] | None = None

    def piece(self, name: str, numel: int, dtype: torch.dtype) -> "DiskPiece":
        """Room for a piece.

        Raises:
            ConfigError: the disk doesn't have it.
        """
        self.store.reserve({name: numel}, dtype)
        return DiskPiece(self, name, numel, dtype)

    def write(self, piece: "DiskPiece", values: Tensor) -> None:
        """Begin to write a piece, while the one before it comes to its end."""
        buffer = self.pool.borrow(piece.numel, piece.dtype, at_most=BUFFERS)
        buffer.copy_(values)
        self.store.write(piece.name, buffer)
        self.settle()
        self._written = (piece, buffer)

    def settle(self) -> None:
        """Wait for the last write."""
        if self._written is not None:
            (piece, buffer), self._written = self._written, None
            self.store.wait(piece.name)
            self.pool.give_back(buffer)


class DiskPiece:
    """This process's piece of one flat vector, on the disk."""

    def __init__(self, disk: WeightDisk, name: str, numel: int, dtype: torch.dtype) -> None:
        self.disk, self.name, self.numel, self.dtype = disk, name, numel, dtype
        self._buffer: Tensor | None = None

    def start_read(self) -> None:
        """Begin to bring it to memory."""
        if self._buffer is None:
            self.disk.settle()
            self._buffer = self.disk.pool.borrow(self.numel, self.dtype, at_most=BUFFERS)
            self.disk.store.read(self.name, self._buffer)

    def read(self) -> Shaped[Tensor, " k"]:
        """The piece in memory, until `give_back`."""
        self.start_read()
        assert self._buffer is not None
        self.disk.store.wait(self.name)
        return self._buffer

    def give_back(self) -> None:
        """End a `read`: its memory may be used for another piece."""
        if self._buffer is not None:
            self.disk.store.wait(self.name)  # where it was read ahead for a use that did not come
            self.disk.pool.give_back(self._buffer)
            self._buffer = None

    def write(self, values: Tensor) -> None:
        """Replace it."""
        self.give_back()
        self.disk.write(self, values)
