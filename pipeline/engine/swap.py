"""Optimizer state that visits memory group by group."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from pipeline.engine.store import TensorStore
from pipeline.kernels.adamw.definition import grain, new_moments


class StreamedState:
    """Master weights and moments of many groups in a store, at most two groups' in memory.

    `sizes` are the groups' numbers of elements, and `moments` is the type in which AdamW keeps its
    own. While one group is stepped, the one before is written from the other set of buffers and
    the one after read into it.
    """

    def __init__(
        self, store: TensorStore, sizes: Sequence[int], moments: torch.dtype = torch.float32
    ) -> None:
        self.store = store
        self.sizes = list(sizes)
        largest = torch.zeros(max(self.sizes, default=0))
        self._sets = [
            {"master": torch.zeros_like(largest), **new_moments(largest, moments)} for _ in range(2)
        ]
        self.names = tuple(self._sets[0])
        """The fp32 masters, and what AdamW keeps for them."""
        for name, buffer in self._sets[0].items():
            own = {_key(group, name): self._size(group, name) for group in range(len(self.sizes))}
            store.reserve(own, buffer.dtype)

    def put(self, group: int, tensors: Sequence[Shaped[Tensor, " _"]]) -> None:
        """Store a group's tensors, in the order of `names`; returns when they are written."""
        for name, tensor in zip(self.names, tensors, strict=True):
            self.store.write(_key(group, name), tensor)
        self._wait(group)

    def each(self, groups: Iterable[int]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Every one of `groups` with its tensors, in the order of `names`.

        What the body does to the tensors in place is kept; they belong to the next but one group
        afterwards. A group whose body is left by an error or `break` stays as it was.

        Raises:
            OffloadError: the disk failed.
        """
        order = list(groups)
        if len(set(order)) != len(order):
            raise ValueError("a group comes twice")
        try:
            for turn, group in enumerate(order):
                if turn == 0:
                    self._read(group, turn, after=None)
                if turn + 1 < len(order):
                    self._read(order[turn + 1], turn + 1, after=order[turn - 1] if turn else None)
                self._wait(group)
                tensors = self._views(group, turn)
                yield group, tensors
                for name, tensor in zip(self.names, tensors, strict=True):
                    self.store.write(_key(group, name), tensor)
        finally:
            self.store.flush()  # the buffers are free for the next time

    def _read(self, group: int, turn: int, *, after: int | None) -> None:
        for name, tensor in zip(self.names, self._views(group, turn), strict=True):
            before = None if after is None else _key(after, name)
            self.store.read(_key(group, name), tensor, after=before)

    def _wait(self, group: int) -> None:
        for name in self.names:
            self.store.wait(_key(group, name))

    def _views(self, group: int, turn: int) -> tuple[Tensor, ...]:
        buffers = self._sets[turn % 2]
        return tuple(buffer[: self._size(group, name)] for name, buffer in buffers.items())

    def _size(self, group: int, name: str) -> int:
        return -(-self.sizes[group] // grain(name))


def _key(group: int, name: str) -> str:
    return f"group {group} {name}"
