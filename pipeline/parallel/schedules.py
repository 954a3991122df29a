"""Pipeline stages: their blocks, and the order of their passes, 1F1B.

Narayanan et al. 2019 (PipeDream-flush): a stage alternates forward and backward passes as soon as
the first gradient can arrive, so that it keeps the activations of at most `stages - stage`
micro-batches. Backward passes run in the order of the micro-batches, so that gradients are summed
as without a pipeline. Before a forward pass a stage receives hidden states from the previous stage,
and then sends its own to the next; before a backward pass it receives their gradient from the next
stage, and then sends that of its input to the previous one.
"""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]


class Instruction(NamedTuple):
    """One pass of a stage."""

    kind: Kind
    micro_batch: int


def make_schedule(*, stage: int, stages: int, count: int) -> list[Instruction]:
    """The passes of a stage in an optimizer step of `count` micro-batches, in order."""
    forward = [Instruction("forward", number) for number in range(count)]
    backward = [Instruction("backward", number) for number in range(count)]
    num_warmup = min(stages - 1 - stage, count)
    steady = chain.from_iterable(zip(forward[num_warmup:], backward, strict=False))
    return [*forward[:num_warmup], *steady, *backward[count - num_warmup :]]


def max_in_flight(stages: int) -> int:
    """Maximum number of tensors sent by a stage but not yet received.

    Beyond that a stage waits, so that memory is bounded. Every tensor is received within this many
    sends after its own, so stages can't deadlock.
    """
    return 4 * stages


def bubble_fraction(stages: int, count: int) -> float:
    """Idle fraction of a step's time, for stages of equal length."""
    return (stages - 1) / (count + stages - 1)


def balance_stages(costs: Sequence[float], stages: int, *, last: float = 0) -> list[int]:
    """Numbers of blocks, at least one per stage, that minimize the time of the slowest stage.

    Among the fastest divisions it is the one with the fastest second slowest stage, and so on, and
    of equal ones the one whose first stages have the fewest blocks, since they keep the activations
    of the most micro-batches.

    Args:
        costs: cost of each block, in any unit of time; sums of integers are exact.
        stages: no more than there are blocks.
        last: additional cost of the last stage, such as that of logits.
    """

    @cache
    def best(start: int, left: int) -> tuple[list[float], list[int]]:
        """Times, slowest first, and block counts of `left` stages with the blocks from `start`."""
        if left == 1:
            return [sum(costs[start:]) + last], [len(costs) - start]
        divisions: list[tuple[list[float], list[int]]] = []
        for stop in range(start + 1, len(costs) - left + 2):
            times, counts = best(stop, left - 1)
            times = sorted([sum(costs[start:stop]), *times], reverse=True)
            divisions.append((times, [stop - start, *counts]))
        return min(divisions)

    return best(0, stages)[1]
