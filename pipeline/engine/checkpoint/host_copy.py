"""What is saved, as it was at the call: copies in host memory, which is kept from save to save."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.engine.checkpoint.layout import Fragment
from pipeline.files.tensor_io import bytes_of

BLOCK_BYTES = 64 * 2**20
"""A power of two: of pinned memory torch takes no other amounts."""

ALIGNMENT = 64


@dataclass(frozen=True)
class HostFragment:
    """One fragment's bytes in host memory, piece by piece."""

    label: str
    dtype: torch.dtype
    parts: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """The bytes it takes."""
        return sum(part.nbytes for part in self.parts)


def total_bytes(fragments: Sequence[HostFragment]) -> int:
    """The bytes that they take together."""
    return sum(each.nbytes for each in fragments)


class HostCopy:
    """Memory for one copy of what is saved.

    As large as the last copy; the first one pays for its pages, unless `prepare` has done so. What
    comes from a GPU goes to pinned memory, at the speed of the bus.
    """

    def __init__(self) -> None:
        self._logs = {pinned: _Log(pinned=pinned) for pinned in (False, True)}

    def prepare(self, num_bytes: int, *, pinned: bool) -> None:
        """Have the memory of the next copy ready, down to its pages.

        Raises:
            MemoryError, RuntimeError: there is none; torch raises either.
        """
        self._logs[pinned].prepare(num_bytes)

    def take(self, fragments: Iterable[Fragment]) -> list[HostFragment]:
        """Copies of the fragments, valid until the next call.

        Raises:
            MemoryError: there is none; all of `fragments` were seen nevertheless, so that
                processes that gather them together stay together.
        """
        for log in self._logs.values():
            log.rewind()
        copies: list[HostFragment] = []
        devices: set[torch.device] = set()
        failure: Exception | None = None
        for fragment in fragments:
            source = fragment.tensor.detach().view(torch.uint8)
            if failure is not None:
                continue
            if source.is_cuda:
                devices.add(source.device)
            try:
                parts = self._logs[source.is_cuda].append(source)
            except (RuntimeError, MemoryError) as error:  # torch raises either
                failure = error
                continue
            copies.append(HostFragment(fragment.label, fragment.tensor.dtype, parts))
        for device in devices:
            torch.cuda.synchronize(device)
        for log in self._logs.values():
            log.trim()
        if failure is not None:
            raise MemoryError(f"no host memory for a copy: {failure}") from failure
        return copies


def views(fragments: Iterable[Fragment]) -> list[HostFragment]:
    """The fragments without a copy, where they are in host memory: they must not change."""
    return [
        HostFragment(
            fragment.label, fragment.tensor.dtype, [bytes_of(fragment.tensor.detach().cpu())]
        )
        for fragment in fragments
    ]


class _Log:
    """Blocks of memory that are filled one after the other."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []
        self._end = 0

    def rewind(self) -> None:
        self._end = 0

    def prepare(self, num_bytes: int) -> None:
        """Have blocks for that many bytes; torch lets other threads run while it fills them."""
        while (there := len(self._blocks) * BLOCK_BYTES) < num_bytes:
            block = self._new_block()
            block[: num_bytes - there].zero_()
            self._blocks.append(block)

    def append(self, source: Tensor) -> list[memoryview]:
        """Copy bytes, from a GPU without waiting for it; where they are now."""
        parts: list[memoryview] = []
        self._end += -self._end % ALIGNMENT
        done = 0
        while done < source.numel():
            index, offset = divmod(self._end, BLOCK_BYTES)
            if index == len(self._blocks):
                self._blocks.append(self._new_block())
            count = min(source.numel() - done, BLOCK_BYTES - offset)
            piece = self._blocks[index][offset : offset + count]
            piece.copy_(source[done : done + count], non_blocking=self._pinned)
            parts.append(bytes_of(piece))
            self._end += count
            done += count
        return parts

    def _new_block(self) -> Tensor:
        return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._pinned)

    def trim(self) -> None:
        """Give back the blocks that the last copy did not need."""
        del self._blocks[-(-self._end // BLOCK_BYTES) :]
