"""Tensors that stages send each other arrive, whatever else is in flight."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import pytest
import torch

from pipeline.parallel.channels import CHANNELS, Channel, What
from pipeline.parallel.mesh import pipeline_of
from pipeline.parallel.schedules import Instruction, Schedule, orders_of
from pipeline.parallel.transfer import Transfers
from tests.distributed import run_ranks


class Call(NamedTuple):
    """A process sends, without waiting, or receives, which it waits for."""

    sends: bool
    what: What
    number: int
    chunk: int
    other: int


def list_calls(stage: int, order: Sequence[Instruction], stages: int, chunks: int) -> list[Call]:
    """Return the sends and receives of a stage in a step, in order."""
    calls: list[Call] = []
    for kind, number, own in order:
        at, back = own * stages + stage, kind == "backward"
        what: What = "gradients" if back else "hidden states"
        before, after = (at + 1, at - 1) if back else (at - 1, at + 1)
        if 0 <= before < stages * chunks:
            calls.append(Call(False, what, number, at, before % stages))
        if 0 <= after < stages * chunks:
            calls.append(Call(True, what, number, after, after % stages))
    return calls


def left_over(calls: list[list[Call]], channel_of: Callable[[Channel], Hashable]) -> int:
    """Calls that never end where a channel's take place one by one and sends wait for receives.

    So NCCL's do, if tensors are larger than its buffers.
    """
    hosts = [deque(each) for each in calls]
    queues: dict[tuple[int, Hashable], deque[tuple[int, Call]]] = {}
    waiting: list[Call | None] = [None] * len(calls)
    moved = True
    while moved:
        moved = False
        for stage, host in enumerate(hosts):
            while host and waiting[stage] is None:
                call = host.popleft()
                sender, receiver = (stage, call.other) if call.sends else (call.other, stage)
                channel = channel_of(Channel(call.what, sender < receiver))
                queues.setdefault((stage, channel), deque()).append((stage, call))
                waiting[stage] = None if call.sends else call
                moved = True
        for (stage, channel), queue in queues.items():
            if not queue:
                continue
            call = queue[0][1]
            across = queues.get((call.other, channel))
            if not across or across[0][1].other != stage or across[0][1].sends == call.sends:
                continue
            theirs = across[0][1]
            assert theirs[1:4] == call[1:4], "one stage sends what the other does not expect"
            queue.popleft()
            across.popleft()
            for process, each in ((stage, call), (call.other, theirs)):
                if not each.sends:
                    waiting[process] = None
            moved = True
    return sum(len(each) for each in (*hosts, *queues.values()))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
)
def test_no_stage_waits_forever_where_sends_wait_for_receives(
    schedule: Schedule, stages: int, chunks: int
) -> None:
    for count in (1, stages, 2 * stages, 2 * stages + 1):
        orders = orders_of(schedule, stages=stages, count=count, chunks=chunks)
        calls = [list_calls(at, order, stages, chunks) for at, order in enumerate(orders)]
        assert {Channel(*each) for each in CHANNELS} >= {
            Channel(call.what, at < call.other if call.sends else call.other < at)
            for at, own in enumerate(calls)
            for call in own
        }

        assert left_over(calls, lambda channel: channel) == 0


def exchanged() -> list[list[float]]:
    """Both send all kinds before they receive any, in channels that each has for itself."""
    stages = pipeline_of([(0, 1)], timeout_seconds=60.0, apart=True)
    assert len({*stages.channels.values(), stages.process_group}) == len(CHANNELS) + 1
    transfers, other = Transfers(stages), 1 - stages.rank
    for number, (what, to_later) in enumerate(CHANNELS):
        if to_later == (stages.rank < other):
            transfers.send(torch.full((3,), float(number)), other, what, micro_batch=number)
    found = [
        transfers.receive(torch.empty(3), other, what, micro_batch=number).tolist()
        for number, (what, to_later) in reversed(list(enumerate(CHANNELS)))
        if to_later == (other < stages.rank)
    ]
    transfers.settle()
    return found


@pytest.mark.jobs
def test_each_kind_has_a_way_of_its_own_in_either_direction() -> None:
    first, second = run_ranks(exchanged, world_size=2)

    assert first == [[float(n)] * 3 for n in (4, 2, 1)]
    assert second == [[float(n)] * 3 for n in (5, 3, 0)]
