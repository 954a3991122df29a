"""Batches of concatenated sequences, and how a global batch is divided into micro-batches.

Batches are not padded: a batch is one long row of tokens and the lengths of its sequences, from
which attention masks are computed. Dimensions: N tokens in total, B sequences, K targets.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pipeline.data.examples import Encoded
from pipeline.parallel.device import to_device
from pipeline.parallel.mesh import current_mesh


@dataclass(frozen=True)
class TokenBatch:
    """A batch of B concatenated sequences."""

    input_ids: Int[Tensor, " N"]

    lengths: tuple[int, ...]
    """Number of tokens in each sequence; the sum is N."""

    targets: Int[Tensor, " K"]
    """Indices into `input_ids` of the tokens in the loss, in ascending order. The first token of a
    sequence can't be predicted and is never among them, unless the sequence continues another."""

    continues: tuple[int | None, ...] = ()
    """For each sequence, the index of the earlier one that it continues and attends to (such as a
    prompt that several responses share), or None. Empty if all are None."""

    teacher: tuple[Int[Tensor, "K k"], Float[Tensor, "K k"]] | None = None
    """The k most likely tokens at each target, with log-probabilities; None without a teacher."""

    @property
    def tokens(self) -> "TokenBatch":
        """This batch; batches of pairs and of labeled rows have an attribute of the same name."""
        return self

    @property
    def num_targets(self) -> int:
        """Number of tokens in the loss."""
        return len(self.targets)

    @property
    def num_tokens(self) -> int:
        """Number of tokens; none are padding."""
        return len(self.input_ids)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Indices of the sequences that no other continues; each ends a collated row."""
        return tuple(sorted(set(range(len(self.lengths))).difference(self.continues)))

    @property
    def longest(self) -> int:
        """Maximum length of a sequence together with the sequence that it continues."""
        continued = [0 if index is None else self.lengths[index] for index in self.continues]
        return max(map(sum, zip_longest(self.lengths, continued, fillvalue=0)))

    @cached_property
    def before_targets(self) -> Int[Tensor, " K"]:
        """Index of the token before each target."""
        if not self.continues:
            return self.targets - 1
        before = torch.arange(-1, self.num_tokens - 1)
        ends = torch.tensor(self.lengths).cumsum(0)
        for index, continued in enumerate(self.continues):
            if continued is not None:
                before[ends[index - 1]] = ends[continued] - 1
        return to_device(before, self.targets.device)[self.targets]

    @property
    def last_tokens(self) -> Int[Tensor, " R"]:
        """Index of the last token of each of the R `rows`."""
        ends = torch.tensor(self.lengths).cumsum(0)[list(self.rows)]
        return to_device(ends, self.input_ids.device) - 1

    def to(self, device: torch.device) -> "TokenBatch":
        """Return the same batch on `device`."""
        input_ids, targets = to_device(self.input_ids, device), to_device(self.targets, device)
        top = self.teacher
        teacher = None if top is None else (to_device(top[0], device), to_device(top[1], device))
        return TokenBatch(input_ids, self.lengths, targets, self.continues, teacher)


def collate(rows: Sequence[Encoded]) -> TokenBatch:
    """Concatenate `rows`; adjacent rows with the same prompt continue one copy of it.

    Results are those of separate copies, in less time (Wang et al. 2024, arXiv:2410.20305).
    """
    sequences: list[Encoded] = []
    continues: list[int | None] = []
    for group in _group_by_prompt(rows):
        length = _prompt_length(rows[group[0]])
        if len(group) == 1 or not length:
            sequences += [rows[row] for row in group]
            continues += [None] * len(group)
            continue
        continues += [None, *[len(sequences)] * len(group)]
        sequences.append(rows[group[0]].head(length))
        sequences += [rows[row].tail(len(rows[row]) - length) for row in group]
    trained = [
        flag and (position > 0 or continued is not None)
        for sequence, continued in zip(sequences, continues, strict=True)
        for position, flag in enumerate(sequence.trained)
    ]
    top = [(row.teacher, row.num_targets) for row in rows if row.teacher is not None]
    teacher = None
    if top:
        ids = torch.from_numpy(np.concatenate([t.top_ids[:count] for t, count in top])).long()
        logprobs = np.concatenate([t.top_logprobs[:count] for t, count in top])
        teacher = ids, torch.from_numpy(logprobs)
    return TokenBatch(
        torch.tensor([token for sequence in sequences for token in sequence.input_ids]),
        tuple(map(len, sequences)),
        torch.tensor(trained).nonzero().squeeze(-1),
        tuple(continues) if any(index is not None for index in continues) else (),
        teacher,
    )


def prompt_units(rows: Sequence[Encoded], *, max_tokens: int) -> list[list[int]]:
    """Divide rows into units of adjacent rows with the same prompt.

    A unit has at most `max_tokens` tokens, unless it is a single row. A shared prompt is counted
    once for each of its rows, so that the responses of a micro-batch take no more memory than if
    each row had its own copy of the prompt.
    """
    units: list[list[int]] = []
    for group in _group_by_prompt(rows):
        num_tokens = max_tokens
        for row in group:
            num_tokens += len(rows[row])
            if num_tokens > max_tokens:
                units.append([])
                num_tokens = len(rows[row])
            units[-1].append(row)
    return units


def _group_by_prompt(rows: Sequence[Encoded]) -> list[list[int]]:
    """Group adjacent rows whose tokens before the first trained token are identical."""
    prompts = [tuple(row.input_ids[: _prompt_length(row)]) for row in rows]
    return [list(group) for _, group in groupby(range(len(rows)), key=prompts.__getitem__)]


def _prompt_length(row: Encoded) -> int:
    return row.trained.index(True) if row.num_targets else 0


def collate_or_empty(rows: Sequence[Encoded], *, filler: Encoded) -> TokenBatch:
    """Concatenate `rows`; if there are none, return `filler` without targets.

    This lets a process without rows run the same passes as the others.
    """
    return collate(rows or [replace(filler, trained=[False] * len(filler))])


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
        self.position = 0  # rows drawn or skipped so far, over all passes
        self.dropped = set[int]()  # rows that are skipped
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return self.next_rows(self.batch_size)

    def next_rows(self, count: int) -> list[int]:
        """Return the indices of the next `count` rows, skipping dropped ones."""
        assert len(self.dropped) < self.num_rows
        rows: list[int] = []
        while len(rows) < count:
            row = self._row_at(self.position)
            rows += [] if row in self.dropped else [row]
            self.position += 1
        return rows

    def num_steps(self, epochs: float, max_steps: int | None) -> int:
        """Return `max_steps`, or the number of steps in `epochs` passes, rounded up."""
        if max_steps is not None:
            return max_steps
        return math.ceil(epochs * self.num_rows / self.batch_size)

    def _row_at(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_rows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(self.num_rows, generator=generator)
            self._epoch = epoch
        return int(self._order[offset])

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position and the dropped rows."""
        return {"position": self.position, "dropped": sorted(self.dropped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict` of another stream with the same rows and seed."""
        self.position, self.dropped = state["position"], set(state.get("dropped", ()))


def micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    num_processes: int,
    process: int,
    min_count: int | None = None,
) -> list[list[int]]:
    """Pack the rows of a global batch into micro-batches; return those of one process.

    Rows are assigned, longest first, to the least full of k micro-batches. k is the smallest
    multiple of `num_processes` for which only micro-batches of a single row exceed `max_tokens`.
    Every process gets the same number of micro-batches of nearly the same size; if there are fewer
    rows than micro-batches, some are empty.

    With `min_count`, k is at least `min_count` and independent of `num_processes`; empty
    micro-batches are then added until the total is a multiple of `num_processes`.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    unit = num_processes if min_count is None else 1
    count = math.ceil(max(min_count or 1, math.ceil(sum(lengths) / max_tokens)) / unit) * unit
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
    lengths: Sequence[int], *, max_tokens: int, min_count: int = 1
) -> list[list[int]]:
    """Pack this process's own rows into micro-batches, the same number on every process.

    There are at least `min_count` micro-batches if there are enough rows. Some may be empty.
    """
    batches = micro_batches(
        lengths,
        max_tokens=max_tokens,
        num_processes=1,
        process=0,
        min_count=min(min_count, max(1, len(lengths))),
    )
    max_batches = int(current_mesh().data.max(len(batches)))
    return batches + [[] for _ in range(max_batches - len(batches))]
