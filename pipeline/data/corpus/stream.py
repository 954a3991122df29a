"""The order in which a run learns from the rows of several files."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.data.corpus.permutation import Permutation


class MixedStream:
    """Endless rows of several files, cut into global batches; the same on every process.

    The next row is of the file that is furthest behind its share (Webster's method), so that every
    stretch of rows has the mixture. A file gives its rows in a random order of its own, and begins
    again, in another one, when it has given all.

    Args:
        sizes: rows of each file.
        weights: its share of the mixture, relative to the other files.
        batch_size: rows of a global batch.
        seed: of the orders.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], *, batch_size: int, seed: int
    ) -> None:
        self.sizes, self.weights = sizes, weights
        self.batch_size, self.seed = batch_size, seed
        self.taken = [0] * len(sizes)
        """Rows handed out of each file so far, over all its passes."""
        self._orders: dict[int, tuple[int, Permutation]] = {}

    @property
    def num_rows(self) -> int:
        """Rows until the file that is shortest for its weight has given all of them once."""
        rows = min(size / weight for size, weight in zip(self.sizes, self.weights, strict=True))
        return max(1, round(rows * sum(self.weights)))

    def num_steps(self, epochs: float, max_steps: int | None) -> int:
        """Batches of a run: `max_steps`, or those of `epochs` times `num_rows`, rounded up."""
        return max_steps or math.ceil(epochs * self.num_rows / self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self

    def __next__(self) -> list[tuple[int, int]]:
        """(file, row) of a global batch."""
        return [self._next_row() for _ in range(self.batch_size)]

    def _next_row(self) -> tuple[int, int]:
        behind = [
            (taken + 0.5) / weight for taken, weight in zip(self.taken, self.weights, strict=True)
        ]
        file = behind.index(min(behind))
        number, place = divmod(self.taken[file], self.sizes[file])
        self.taken[file] += 1
        order = self._orders.get(file)
        if order is None or order[0] != number:
            order = number, Permutation(self.sizes[file], f"{self.seed} pass {number} file {file}")
            self._orders[file] = order
        return file, order[1][place]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return {"taken": list(self.taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another stream of the same files, weights and seed stood."""
        self.taken = list(state["taken"])
