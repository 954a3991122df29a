"""The order in which the stages of a pipeline run their passes: 1F1B.

Narayanan et al. 2019 (PipeDream-flush): a stage alternates forward and backward passes as soon as
the first gradient can arrive, so that it keeps the activations of `stages - stage` micro-batches at
most. Backward passes run in the order of the micro-batches, so that gradients are added as without
a pipeline. Before a forward pass a stage receives hidden states from the stage before, and after it
sends its own; before a backward pass it receives their gradient from the stage behind, and after it
sends that of its input.
"""

from itertools import chain
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]


class Instruction(NamedTuple):
    """One pass of a stage."""

    kind: Kind
    micro_batch: int


def instructions(*, stage: int, stages: int, count: int) -> list[Instruction]:
    """The passes of a stage in an optimizer step of `count` micro-batches, in order."""
    forward = [Instruction("forward", number) for number in range(count)]
    backward = [Instruction("backward", number) for number in range(count)]
    ahead = min(stages - 1 - stage, count)
    steady = chain.from_iterable(zip(forward[ahead:], backward, strict=False))
    return [*forward[:ahead], *steady, *backward[count - ahead :]]


def most_sent(stages: int) -> int:
    """Tensors that a stage may send before the oldest of them has been received.

    A stage that keeps more waits, so that memory stays bounded. No tensor is received later than
    this many sends after its own, so stages can't wait for each other.
    """
    return 4 * stages


def bubble(stages: int, count: int) -> float:
    """Share of a step's time that stages of equal length wait."""
    return (stages - 1) / (count + stages - 1)
