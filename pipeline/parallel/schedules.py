"""In which order the stages of a pipeline go forward and back: lists of instructions, and a clock.

A stage's list has its own work alone. What travels follows from it: before a forward pass a stage
receives hidden states from the stage before, and sends its own on after it; before a backward pass
it receives their gradient from the stage behind, and sends that of its input back after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Schedule = Literal["gpipe", "1f1b"]
Kind = Literal["forward", "backward"]


class Instruction(NamedTuple):
    """One pass of a stage."""

    kind: Kind
    micro_batch: int


def instructions(schedule: Schedule, *, stage: int, stages: int, count: int) -> list[Instruction]:
    """What a stage does in an optimizer step of `count` micro-batches.

    gpipe goes forward with all of them and then back (Huang et al. 2019); 1f1b alternates as soon
    as the first gradient can be there, so that a stage keeps the activations of `stages - stage`
    micro-batches at most (Narayanan et al. 2019, PipeDream-flush). Both go back in the order of the
    micro-batches, so that gradients are added as without a pipeline.
    """
    ahead = count if schedule == "gpipe" else min(stages - 1 - stage, count)
    order = [Instruction("forward", each) for each in range(ahead)]
    for each in range(ahead, count):
        order += [Instruction("forward", each), Instruction("backward", each - ahead)]
    return order + [Instruction("backward", each) for each in range(count - ahead, count)]


@dataclass(frozen=True)
class Timetable:
    """When the stages do what, in the unit that the passes were given in."""

    starts: list[dict[Instruction, float]]
    """Of each stage's instructions."""

    seconds: float
    """From the first instruction to the end of the last."""

    bubble: float
    """Share of the stages' time in which they wait."""

    kept: list[int]
    """Micro-batches whose activations each stage keeps, at most."""


class DeadlockError(RuntimeError):
    """Stages wait for each other."""


def simulate(
    orders: Sequence[Sequence[Instruction]], *, forward: float = 1.0, backward: float = 2.0
) -> Timetable:
    """Run the lists of all stages, each pass of which takes as long on every stage.

    Raises:
        DeadlockError: they can't be run to their ends.
    """
    stages = len(orders)
    ends: list[dict[Instruction, float]] = [{} for _ in orders]
    starts: list[dict[Instruction, float]] = [{} for _ in orders]
    free, kept, most = [0.0] * stages, [0] * stages, [0] * stages
    ahead = [list(order) for order in orders]
    while any(ahead):
        moved = False
        for stage, left in enumerate(ahead):
            ready = _ready(left[0], stage, ends) if left else None
            if ready is None:
                continue
            moved = True
            each = left.pop(0)
            starts[stage][each] = max(free[stage], ready)
            is_forward = each.kind == "forward"
            free[stage] = starts[stage][each] + (forward if is_forward else backward)
            ends[stage][each] = free[stage]
            kept[stage] += 1 if is_forward else -1
            most[stage] = max(most[stage], kept[stage])
        if not moved:
            waiting = [f"stage {n} at {left[0]}" for n, left in enumerate(ahead) if left]
            raise DeadlockError(f"no stage can go on: {', '.join(waiting)}")
    total = max(free)
    busy = sum((forward if each.kind == "forward" else backward) for o in orders for each in o)
    return Timetable(starts, total, 1 - busy / (stages * total) if total else 0.0, most)


def drawn(orders: Sequence[Sequence[Instruction]]) -> list[str]:
    """A timetable in text, a line for each stage: forward passes of one column, backward of two.

    A pass is the last digit of its micro-batch, a backward pass twice, and a dot is a wait.
    """
    rows: list[str] = []
    table = simulate(orders)
    for starts in table.starts:
        row = ["."] * round(table.seconds)
        for each, start in starts.items():
            width = 1 if each.kind == "forward" else 2
            at = round(start)
            row[at : at + width] = str(each.micro_batch % 10) * width
        rows.append("".join(row))
    return rows


def bubble(stages: int, count: int) -> float:
    """Share of a step's time that stages of equal length wait in either schedule."""
    return (stages - 1) / (count + stages - 1)


def _ready(each: Instruction, stage: int, ends: Sequence[dict[Instruction, float]]) -> float | None:
    """When what it needs is there; None where nobody knows yet."""
    if each.kind == "forward":
        return 0.0 if stage == 0 else ends[stage - 1].get(each)
    needed = Instruction("forward", each.micro_batch)
    own = ends[stage].get(needed)
    if own is None or stage == len(ends) - 1:
        return own
    return ends[stage + 1].get(each)
