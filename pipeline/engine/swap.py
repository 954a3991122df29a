"""Optimizer state that visits memory group by group."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.engine.store import TensorStore

NAMES = ("master", "exp_avg", "exp_avg_sq")
"""The fp32 tensors of AdamW: the weights and the two moments of their gradients."""


class StreamedState:
    """Master weights and moments of many groups in a store, at most two groups' in memory.

    `sizes` are the groups' numbers of elements. While one group is stepped, the one before is
    written from the other set of buffers and the one after read into it.
    """

    def __init__(self, store: TensorStore, sizes: Sequence[int]) -> None:
        self.store = store
        self.sizes = list(sizes)
        store.reserve(
            {_key(group, name): size for group, size in enumerate(sizes) for name in NAMES},
            torch.float32,
        )
        largest = max(self.sizes, default=0)
        self._sets = [tuple(torch.zeros(largest) for _ in NAMES) for _ in range(2)]

    def put(self, group: int, tensors: Sequence[Float[Tensor, " n"]]) -> None:
        """Store a group's tensors, in the order of NAMES; returns when they are written."""
        for name, tensor in zip(NAMES, tensors, strict=True):
            self.store.write(_key(group, name), tensor)
        self._wait(group)

    def each(self, groups: Iterable[int]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Every one of `groups` with its tensors, in the order of NAMES.

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
                for name, tensor in zip(NAMES, tensors, strict=True):
                    self.store.write(_key(group, name), tensor)
        finally:
            self.store.flush()  # the buffers are free for the next time

    def _read(self, group: int, turn: int, *, after: int | None) -> None:
        for name, tensor in zip(NAMES, self._views(group, turn), strict=True):
            before = None if after is None else _key(after, name)
            self.store.read(_key(group, name), tensor, after=before)

    def _wait(self, group: int) -> None:
        for name in NAMES:
            self.store.wait(_key(group, name))

    def _views(self, group: int, turn: int) -> tuple[Tensor, ...]:
        return tuple(buffer[: self.sizes[group]] for buffer in self._sets[turn % 2])


def _key(group: int, name: str) -> str:
    return f"group {group} {name}"
