"""Batches: concatenated sequences, and the division of a global batch.

There is no padding: a batch is one long row of tokens and the lengths of its sequences, so masks
can only come from lengths. Dimension names: N tokens of all sequences, B sequences, K targets.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from pipeline.data.examples import Encoded
from pipeline.parallel.device import send
from pipeline.parallel.mesh import current_mesh


@dataclass(frozen=True)
class TokenBatch:
    """B sequences, concatenated."""

    input_ids: Int[Tensor, " N"]

    lengths: tuple[int, ...]
    """Tokens of each sequence; they add up to N."""

    targets: Int[Tensor, " K"]
    """Indices into `input_ids` of the tokens in the loss, in ascending order. The first token of a
    sequence can't be predicted and is never among them."""

    @property
    def tokens(self) -> "TokenBatch":
        """The batch itself, so that batches of pairs and labelled rows have the same attribute."""
        return self

    @property
    def num_targets(self) -> int:
        """Number of tokens in the loss."""
        return len(self.targets)

    @property
    def num_tokens(self) -> int:
        """Number of tokens; none are padding."""
        return len(self.input_ids)

    @property
    def last_tokens(self) -> Int[Tensor, " B"]:
        """Index of the last token of each sequence."""
        return send(torch.tensor(self.lengths).cumsum(0), self.input_ids.device) - 1

    def to(self, device: torch.device) -> "TokenBatch":
        """The same batch on `device`."""
        return TokenBatch(send(self.input_ids, device), self.lengths, send(self.targets, device))


def collate(rows: Sequence[Encoded]) -> TokenBatch:
    """Concatenate `rows`."""
    input_ids = torch.tensor([token for row in rows for token in row.input_ids])
    trained = torch.tensor(
        [flag and position > 0 for row in rows for position, flag in enumerate(row.trained)]
    )
    return TokenBatch(input_ids, tuple(len(row) for row in rows), trained.nonzero().squeeze(-1))


def collate_part(rows: Sequence[Encoded], *, spare: Encoded) -> TokenBatch:
    """Concatenate `rows`; if there are none, return `spare` without targets.

    This lets a process without rows run the same passes as the others.
    """
    return collate(rows) if rows else collate([Encoded.untrained(spare.input_ids)])


def pad(sequences: Sequence[Tensor]) -> tuple[Tensor, Bool[Tensor, "B T"]]:
    """Stack 1-D tensors into (B, T), right-padded with zeros; the mask is True on real tokens."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    padded = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return padded, mask.to(padded.device)


class RowStream:
    """An endless stream of shuffled row indices in global batches, the same on every process.

    Each pass over the rows has its own permutation, drawn from (seed, pass). A batch may begin in
    one pass and end in the next, so that no row is dropped.
    """

    def __init__(self, *, num_rows: int, batch_size: int, seed: int) -> None:
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.position = 0  # rows drawn so far, over all passes
        self._pass = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return self.take(self.batch_size)

    def take(self, count: int) -> list[int]:
        """The next `count` rows."""
        rows = [self._row(self.position + offset) for offset in range(count)]
        self.position += count
        return rows

    def num_steps(self, epochs: float, max_steps: int | None) -> int:
        """Number of steps of a run: `max_steps`, or `epochs` passes over the rows, rounded up."""
        if max_steps is not None:
            return max_steps
        return math.ceil(epochs * self.num_rows / self.batch_size)

    def _row(self, position: int) -> int:
        number, offset = divmod(position, self.num_rows)
        if number != self._pass:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            self._order = torch.randperm(self.num_rows, generator=generator)
            self._pass = number
        return int(self._order[offset])

    def state_dict(self) -> dict[str, int]:
        """The stream's position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position of another stream with the same rows and seed."""
        self.position = state["position"]


def micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    num_processes: int,
    process: int,
    at_least: int | None = None,
) -> list[list[int]]:
    """Pack the rows of a global batch into micro-batches; return those of one process.

    Rows go to the least filled of k micro-batches, longest first, with k the smallest multiple of
    `num_processes` whose micro-batches all hold at most `max_tokens` (or a single row). Every
    process gets the same number of micro-batches of nearly the same size; if there are fewer rows
    than micro-batches, some are empty.

    With `at_least`, k is at least that regardless of `num_processes`, so that any number of
    processes computes the same micro-batches; empty ones fill up to a multiple.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    unit = num_processes if at_least is None else 1
    count = math.ceil(max(at_least or 1, math.ceil(sum(lengths) / max_tokens)) / unit) * unit
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for row in longest_first:
            emptiest = min(range(count), key=lambda index: (filled[index], index))
            bins[emptiest].append(row)
            filled[emptiest] += lengths[row]
        if all(tokens <= max_tokens or len(b) == 1 for tokens, b in zip(filled, bins, strict=True)):
            bins += [[] for _ in range(-count % num_processes)]
            return [sorted(b) for b in bins[process::num_processes]]
        count += unit


def local_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, at_least: int = 1
) -> list[list[int]]:
    """Pack this process's own rows into micro-batches, the same number on every process.

    There are at least `at_least` if there are enough rows. Some may be empty.
    """
    parts = micro_batches(
        lengths,
        max_tokens=max_tokens,
        num_processes=1,
        process=0,
        at_least=min(at_least, max(1, len(lengths))),
    )
    most = int(current_mesh().data.max(len(parts)))
    return parts + [[] for _ in range(most - len(parts))]
