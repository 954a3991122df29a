"""Tensors that stages send each other arrive, whatever else is in flight."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from pipeline.parallel.group import TRANSFER_KINDS, TransferKind
from pipeline.parallel.mesh import new_pipeline_group
from pipeline.parallel.schedules import Instruction, make_schedule
from pipeline.parallel.transfer import Transfers
from tests.distributed import run_ranks


class Call(NamedTuple):
    """A process sends, without waiting, or receives, which it waits for."""

    sends: bool
    what: TransferKind
    number: int
    other: int


def list_calls(stage: int, order: Sequence[Instruction], stages: int) -> list[Call]:
    """Return the sends and receives of a stage in a step, in order."""
    calls: list[Call] = []
    for kind, number in order:
        back = kind == "backward"
        what: TransferKind = "gradients" if back else "hidden states"
        before, after = (stage + 1, stage - 1) if back else (stage - 1, stage + 1)
        if 0 <= before < stages:
            calls.append(Call(False, what, number, before))
        if 0 <= after < stages:
            calls.append(Call(True, what, number, after))
    return calls


def left_over(calls: list[list[Call]]) -> int:
    """Calls that never end where a channel's take place one by one and sends wait for receives.

    So NCCL's do, if tensors are larger than its buffers.
    """
    hosts = [deque(each) for each in calls]
    queues: dict[tuple[int, TransferKind], deque[tuple[int, Call]]] = {}
    waiting: list[Call | None] = [None] * len(calls)
    moved = True
    while moved:
        moved = False
        for stage, host in enumerate(hosts):
            while host and waiting[stage] is None:
                call = host.popleft()
                queues.setdefault((stage, call.what), deque()).append((stage, call))
                waiting[stage] = None if call.sends else call
                moved = True
        for (stage, what), queue in queues.items():
            if not queue:
                continue
            call = queue[0][1]
            across = queues.get((call.other, what))
            if not across or across[0][1].other != stage or across[0][1].sends == call.sends:
                continue
            theirs = across[0][1]
            assert theirs[1:3] == call[1:3], "one stage sends what the other does not expect"
            queue.popleft()
            across.popleft()
            for process, each in ((stage, call), (call.other, theirs)):
                if not each.sends:
                    waiting[process] = None
            moved = True
    return sum(len(each) for each in (*hosts, *queues.values()))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_stage_waits_forever_where_sends_wait_for_receives(stages: int) -> None:
    for count in (1, stages, 2 * stages, 2 * stages + 1):
        orders = [make_schedule(stage=at, stages=stages, count=count) for at in range(stages)]

        assert left_over([list_calls(at, order, stages) for at, order in enumerate(orders)]) == 0


def exchanged() -> list[list[float]]:
    """Both send all kinds before they receive any, in channels that each has for itself."""
    stages = new_pipeline_group([(0, 1)], timeout_seconds=60.0, has_tags=False)
    groups = (stages, *stages.channels.values())
    assert len({each.process_group for each in groups}) == len(TRANSFER_KINDS) + 1
    transfers, other = Transfers(stages), 1 - stages.rank
    for number, what in enumerate(TRANSFER_KINDS):
        tensor = torch.full((3,), 10.0 * stages.rank + number)
        transfers.send(tensor, other, what)
    found = [
        transfers.receive(torch.empty(3), other, what, micro_batch=number).tolist()
        for number, what in reversed(list(enumerate(TRANSFER_KINDS)))
    ]
    transfers.wait()
    return found


@pytest.mark.jobs
def test_each_kind_has_a_separate_communicator() -> None:
    first, second = run_ranks(exchanged, world_size=2)

    assert first == [[10.0 + n] * 3 for n in (3, 2, 1, 0)]
    assert second == [[float(n)] * 3 for n in (3, 2, 1, 0)]
