"""Processes of one machine that compute a layer together: they read each other's memory.

A layer takes ten exchanges of a few hundred KiB. Through gloo each costs more processor time, most
of it in threads of its own, than the product that waits for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.group import Group
from pipeline.parallel.rendezvous import Rendezvous
from pipeline.parallel.shared_memory import CACHE_LINE, SharedMemory, on_one_machine

LETTER_BYTES = 2**20
"""Of a tensor that travel at once: they are read while they are in a cache."""


def neighbours(group: Group) -> Group:
    """The group, whose processes read each other's memory if they can; all of them call it."""
    if dist.get_backend(group.process_group) != "gloo" or not on_one_machine(group.apart):
        return group
    return Neighbours(
        group.rank,
        group.ranks,
        group.process_group,
        group.counted,
        group.in_step,
        letters=Letters(group.apart),
    )


@dataclass(frozen=True)
class Neighbours(Group):
    """A group whose tensors don't go through torch's process group."""

    letters: "Letters" = field(kw_only=True)

    def _gather(self, own: Tensor, what: str) -> list[Tensor]:
        return self.letters.gather(own, f"all_gather of {what}, {own.nbytes} bytes")

    def _exchange(self, own: Tensor, what: str) -> Tensor:
        return self.letters.exchange(own, f"all_to_all of {what}, {own.nbytes} bytes")


class Letters:
    """Where a process of a group puts what the others read.

    There are two places, used in turn. Who comes to a meeting has read what it met for before: what
    lay in the place that is written now.
    """

    def __init__(self, group: Group) -> None:
        self._rank, self._size = group.rank, group.size
        self._memory = SharedMemory(group)
        self._rendezvous = Rendezvous(self._memory.table, self._memory.pids)
        own, other = (self._memory.allocate(LETTER_BYTES, torch.uint8) for _ in range(2))
        self._now, self._next = own, other

    def gather(self, own: Tensor, label: str) -> list[Tensor]:
        """What a tensor is on each process; `own` is this process's itself."""
        parts = [own if n == self._rank else torch.empty_like(own) for n in range(self._size)]
        whole = [_bytes(part) for part in parts]
        for first in range(0, own.nbytes, LETTER_BYTES):
            piece = whole[self._rank][first : first + LETTER_BYTES]
            letter = self._place(len(piece))
            letter.copy_(piece)
            for other, theirs in self._met(letter, label):
                whole[other][first : first + LETTER_BYTES].copy_(theirs)
        return parts

    def exchange(self, own: Tensor, label: str) -> Tensor:
        """What each process has for this one, of parts for each along the first dimension."""
        received = torch.empty_like(own)
        received[self._rank].copy_(own[self._rank])
        to, came = (_bytes(each).view(self._size, -1) for each in (own, received))
        step = LETTER_BYTES // self._size // CACHE_LINE * CACHE_LINE
        for first in range(0, to.shape[1], step):
            pieces = to[:, first : first + step]
            letter = self._place(pieces.numel())
            written = letter.view(pieces.shape)
            for other in self._rendezvous.others:
                written[other].copy_(pieces[other])
            for other, theirs in self._met(letter, label):
                came[other, first : first + step].copy_(theirs.view(pieces.shape)[self._rank])
        return received

    def _place(self, num_bytes: int) -> Tensor:
        self._now, self._next = self._next, self._now
        return self._now[:num_bytes]

    def _met(self, letter: Tensor, label: str) -> Iterator[tuple[int, Tensor]]:
        """The others with what they have where this process has `letter`, once all are there."""
        self._rendezvous.attend(label)
        for other in self._rendezvous.others:
            yield other, self._memory.of_rank(other, letter)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
