"""The global gradient norm, the same to the last bit whatever the sharding.

A vector counts as CHUNKS equal stretches. Each stretch lies whole on one process wherever the
number of processes divides CHUNKS; its squares are summed there, by the same code at the same
length, and the stretches of all processes are put together by one exact collective.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.engine.comm.collectives import Collectives
from pipeline.engine.sharding.flat import num_chunks
from pipeline.parallel.group import Group

BLOCK = 262144
"""Elements that are converted to fp64 at once: 2 MiB, enough to amortize a call."""

GPU_COLUMNS = 2**18
"""Elements of each stretch that are converted to fp64 at once on a GPU."""

MOST_READ = 256
"""Stretches of a vector whose sums the host adds, exactly."""

RUN = 4096
"""Elements that are summed at once: PyTorch shares rows among threads, never a row of so few, so
that the order of addition is the same for each number of threads."""


def squared_norms(shard: Float[Tensor, " k"], rows: int) -> Float[Tensor, " rows"]:
    """Sum of squares of each of the `rows` equal stretches of `shard`, in float64."""
    stretches = shard.view(rows, -1)
    if shard.device.type != "cpu":
        # A norm in another dtype copies its input: in pieces the copy stays small.
        pieces = stretches.split(GPU_COLUMNS, dim=1)
        norms = [torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) for each in pieces]
        return torch.stack(norms).square().sum(0)
    # On a CPU a reduction that casts as it goes is twenty times slower than these two passes.
    block = torch.empty(BLOCK, dtype=torch.float64)
    return torch.tensor([_sum_of_squares(row, block) for row in stretches], dtype=torch.float64)


def squares_of_pieces(piece: Float[Tensor, " k"], comm: Collectives) -> Float[Tensor, " rows"]:
    """Sums of squares of a reduced gradient by stretches, of which a process has a piece.

    Float64, of `num_chunks` values; the other processes' stretches are zero.
    """
    rows = num_chunks(comm.size)
    values = torch.zeros(rows, dtype=torch.float64, device=piece.device)
    if comm.copy == 0:  # all copies have the same sum, which counts once
        comm.piece(values).copy_(squared_norms(piece, rows // comm.size))
    return values


class NormsOfParts:
    """Sums of squares over all parts of a model; constructed by all processes with a part."""

    def __init__(self, parts: Group, units: Sequence[str]) -> None:
        self._parts = parts
        of_parts = parts.gather_objects(list(units))
        self.units = [unit for own in of_parts for unit in own]
        """The unit of each vector, those of the first part first."""
        self._before = sum(len(own) for own in of_parts[: parts.rank])
        self._own = len(units)

    def gathered(self, own: Sequence[float]) -> Sequence[float]:
        """Sums of squares of the vectors of all parts, with equally many numbers per vector.

        Each is zero except on one part, so that their sums are exact.
        """
        if self._parts.size == 1:
            return own
        rows = len(own) // self._own
        after = len(self.units) - self._before - self._own
        values = [*[0.0] * (self._before * rows), *own, *[0.0] * (after * rows)]
        return self._parts.sums(values)


def _sum_of_squares(values: Float[Tensor, " n"], block: Float[Tensor, " b"]) -> float:
    sums: list[float] = []
    for part in values.split(len(block)):
        squares = block[: len(part)].copy_(part)
        squares.mul_(squares)
        whole = len(part) // RUN * RUN
        sums += squares[:whole].view(-1, RUN).sum(dim=1).tolist()
        sums.append(squares[whole:].sum().item())
    return math.fsum(sums)
