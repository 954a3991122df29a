"""Pipeline stages: their blocks, and the order of their passes (1F1B).

Narayanan et al. 2021 (PipeDream-Flush): a stage alternates forward and backward passes as soon as
the first gradient can arrive, so that it keeps the activations of at most `stages - stage`
micro-batches. Backward passes run in the order of the micro-batches, so that gradients are summed
as without a pipeline. A stage receives hidden states from the previous stage before a forward pass,
and then sends its output to the next stage. It receives that output's gradient from the next stage
before the backward pass, and then sends the gradient of its input to the previous stage.
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
    """List a stage's passes, in order, in an optimizer step of `count` micro-batches."""
    forward = [Instruction("forward", number) for number in range(count)]
    backward = [Instruction("backward", number) for number in range(count)]
    num_warmup = min(stages - 1 - stage, count)
    steady = chain.from_iterable(zip(forward[num_warmup:], backward, strict=False))
    return [*forward[:num_warmup], *steady, *backward[count - num_warmup :]]


def max_in_flight(stages: int) -> int:
    """Return the maximum number of tensors sent by a stage but not yet received.

    Beyond that a stage waits, so that memory is bounded. Every tensor is received before its sender
    has sent this many more, so stages can't deadlock.
    """
    return 4 * stages


def bubble_fraction(stages: int, count: int) -> float:
    """Return the idle fraction of a step's time if all stages take equally long."""
    return (stages - 1) / (count + stages - 1)


def balance_stages(costs: Sequence[float], stages: int, *, last: float = 0) -> list[int]:
    """Choose each stage's number of blocks, so that the slowest stage is as fast as possible.

    Ties are broken by the time of the second slowest stage, and so on, and finally in favor of
    fewer blocks in the first stages, since they keep the activations of the most micro-batches.
    Each stage has at least one block. `costs` lists the cost of each block, in any unit of time;
    sums of integers are exact. `last` is the last stage's additional cost, such as for the logits.
    """

    @cache
    def best(start: int, left: int) -> tuple[list[float], list[int]]:
        """Split blocks from `start` into `left` stages; return sorted times and block counts."""
        if left == 1:
            return [sum(costs[start:]) + last], [len(costs) - start]
        divisions: list[tuple[list[float], list[int]]] = []
        for stop in range(start + 1, len(costs) - left + 2):
            times, counts = best(stop, left - 1)
            times = sorted([sum(costs[start:stop]), *times], reverse=True)
            divisions.append((times, [stop - start, *counts]))
        return min(divisions)

    return best(0, stages)[1]
