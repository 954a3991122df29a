"""In which order the stages of a pipeline go forward and back: lists of instructions, and a clock.

A stage's list has its own work alone. What travels follows from it: before a forward pass a stage
receives hidden states from the stage before, and sends its own on after it; before a backward pass
it receives their gradient from the stage behind, and sends that of its input back after it. Of a
stage that has several chunks of the model, chunk c comes behind chunk c of the stage before, and
the first stage's behind chunk c - 1 of the last one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Kind = Literal["forward", "backward"]

DIGITS = ("0123456789", "abcdefghij", "ABCDEFGHIJ")
"""Micro-batches in a drawn timetable, by their last digit, of a stage's first chunk and others."""


class Instruction(NamedTuple):
    """One pass of a stage through one of its chunks."""

    kind: Kind
    micro_batch: int
    chunk: int = 0


def instructions(
    schedule: Schedule, *, stage: int, stages: int, count: int, chunks: int = 1
) -> list[Instruction]:
    """What a stage does in an optimizer step of `count` micro-batches.

    gpipe goes forward with all of them and then back (Huang et al. 2019); 1f1b alternates as soon
    as the first gradient can be there, so that a stage keeps the activations of `stages - stage`
    micro-batches at most (Narayanan et al. 2019, PipeDream-flush). interleaved does so with several
    chunks to a stage, through each of which about `stages` micro-batches go before the next one's
    turn (Narayanan et al. 2021, 2104.04473). All go back through a chunk in the order of the
    micro-batches, so that gradients are added as without a pipeline.
    """
    forward = [Instruction("forward", *each) for each in turns(stages, count, chunks)]
    back = [
        Instruction("backward", number, chunks - 1 - chunk)
        for number, chunk in turns(stages, count, chunks)
    ]
    if schedule == "gpipe":
        return forward + back
    ahead = stages - 1 - stage
    if schedule == "interleaved":
        ahead = (chunks - 1) * max(_rounds(stages, count)) + 2 * ahead
    ahead = min(ahead, len(forward))
    steady = chain.from_iterable(zip(forward[ahead:], back, strict=False))
    return [*forward[:ahead], *steady, *back[len(back) - ahead :]]


def most_sent(stages: int, chunks: int) -> int:
    """Tensors that a stage may send before the oldest of them has been received.

    A stage that keeps more waits, so that memory stays bounded. In no schedule a tensor is received
    later than this many sends after its own, so stages can't wait for each other.
    """
    return 4 * stages * chunks


def orders_of(
    schedule: Schedule, *, stages: int, count: int, chunks: int = 1
) -> list[list[Instruction]]:
    """What each of the stages does in an optimizer step."""
    return [
        instructions(schedule, stage=stage, stages=stages, count=count, chunks=chunks)
        for stage in range(stages)
    ]


def turns(stages: int, count: int, chunks: int) -> list[tuple[int, int]]:
    """Micro-batch and chunk of each forward pass of a stage, in order."""
    if chunks == 1:
        return [(number, 0) for number in range(count)]
    ends = accumulate(_rounds(stages, count), initial=0)
    return [
        (number, chunk)
        for first, stop in pairwise(ends)
        for chunk in range(chunks)
        for number in range(first, stop)
    ]


def _rounds(stages: int, count: int) -> list[int]:
    """Micro-batches that go through a chunk before the next one's turn: at least one a stage.

    As many in each round, or one more in the first ones; fewer than stages where there are no more.
    """
    rounds = max(1, count // stages)
    return [count // rounds + (each < count % rounds) for each in range(rounds)]


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
    """Passes whose activations each stage keeps, at most."""


class DeadlockError(RuntimeError):
    """Stages wait for each other."""


TIMES = {"forward": 1.0, "backward": 2.0}
"""How long a pass takes on any stage: a backward pass has twice the products."""


def simulate(orders: Sequence[Sequence[Instruction]]) -> Timetable:
    """Run the lists of all stages, each pass of which takes as long on every stage (`TIMES`).

    Raises:
        DeadlockError: they can't be run to their ends.
    """
    stages = len(orders)
    chunks = 1 + max((each.chunk for order in orders for each in order), default=0)
    ends: list[dict[Instruction, float]] = [{} for _ in orders]
    starts: list[dict[Instruction, float]] = [{} for _ in orders]
    free, done = [0.0] * stages, [0] * stages
    while any(at < len(order) for at, order in zip(done, orders, strict=True)):
        moved = False
        for stage, order in enumerate(orders):
            left = order[done[stage]] if done[stage] < len(order) else None
            ready = None if left is None else _ready(left, stage, ends, chunks)
            if left is None or ready is None:
                continue
            moved = True
            done[stage] += 1
            starts[stage][left] = max(free[stage], ready)
            free[stage] = starts[stage][left] + TIMES[left.kind]
            ends[stage][left] = free[stage]
        if not moved:
            places = enumerate(zip(done, orders, strict=True))
            waiting = [f"stage {n} at {order[at]}" for n, (at, order) in places if at < len(order)]
            raise DeadlockError(f"no stage can go on: {', '.join(waiting)}")
    total = max(free)
    busy = sum(TIMES[each.kind] for order in orders for each in order)
    kept = [most_kept(order, [1.0] * chunks).total() for order in orders]
    return Timetable(starts, total, 1 - busy / (stages * total) if total else 0.0, kept)


def most_kept(order: Sequence[Instruction], sizes: Sequence[float]) -> Counter[int]:
    """How many passes through each chunk a stage keeps when what it keeps is largest.

    Args:
        order: what the stage does.
        sizes: of what a pass through each chunk keeps, in any unit.
    """
    now, most, largest = Counter[int](), Counter[int](), 0.0
    for each in order:
        now[each.chunk] += 1 if each.kind == "forward" else -1
        size = sum(number * sizes[chunk] for chunk, number in now.items())
        if size > largest:
            most, largest = now.copy(), size
    return most


def drawn(orders: Sequence[Sequence[Instruction]]) -> list[str]:
    """A timetable in text, a line for each stage: forward passes of one column, backward of two.

    A pass is the last digit of its micro-batch, in other chunks than the first a letter for it, a
    backward pass is it twice, and a dot is a wait.
    """
    rows: list[str] = []
    table = simulate(orders)
    for starts in table.starts:
        row = ["."] * round(table.seconds)
        for each, start in starts.items():
            width = 1 if each.kind == "forward" else 2
            at = round(start)
            sign = DIGITS[each.chunk % len(DIGITS)][each.micro_batch % 10]
            row[at : at + width] = sign * width
        rows.append("".join(row))
    return rows


def bubble(schedule: Schedule, stages: int, count: int, chunks: int = 1) -> float:
    """Share of a step's time that stages of equal length wait."""
    if chunks == 1 or count % stages == 0:
        return (stages - 1) / (chunks * count + stages - 1)
    return simulate(orders_of(schedule, stages=stages, count=count, chunks=chunks)).bubble


def _ready(
    each: Instruction, stage: int, ends: Sequence[dict[Instruction, float]], chunks: int
) -> float | None:
    """When what it needs is there; None where nobody knows yet."""
    stages = len(ends)
    place = each.chunk * stages + stage
    if each.kind == "forward":
        return 0.0 if place == 0 else _end_of(each, place - 1, ends)
    own = ends[stage].get(each._replace(kind="forward"))
    if own is None or place == chunks * stages - 1:
        return own
    return _end_of(each, place + 1, ends)


def _end_of(
    each: Instruction, place: int, ends: Sequence[dict[Instruction, float]]
) -> float | None:
    """When the same pass ends in the chunk of that place in the whole model."""
    chunk, stage = divmod(place, len(ends))
    return ends[stage].get(each._replace(chunk=chunk))
