"""The order in which the stages of a pipeline run their passes: 1F1B, and its timetable.

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

TIMES = {"forward": 1.0, "backward": 2.0}
"""Duration of a pass on any stage: a backward pass has twice the products."""


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


def timetable(stages: int, count: int) -> list[dict[Instruction, float]]:
    """The time at which each stage starts each of its passes, by `TIMES`."""
    left = [instructions(stage=stage, stages=stages, count=count) for stage in range(stages)]
    starts: list[dict[Instruction, float]] = [{} for _ in range(stages)]
    free = [0.0] * stages
    while any(left):
        for stage, passes in enumerate(left):
            while passes:
                at = passes[0]
                source = stage - 1 if at.kind == "forward" else stage + 1
                ready = 0.0
                if 0 <= source < stages:
                    if at not in starts[source]:
                        break
                    ready = starts[source][at] + TIMES[at.kind]
                starts[stage][at] = max(free[stage], ready)
                free[stage] = starts[stage][at] + TIMES[at.kind]
                del passes[0]
    return starts


def bubble(stages: int, count: int) -> float:
    """Share of a step's time that stages of equal length wait."""
    return (stages - 1) / (count + stages - 1)
