"""Transfers between stages finish, whatever else is in flight."""

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
    """A send, which doesn't block, or a receive, which does."""

    sends: bool
    kind: TransferKind
    number: int
    peer: int


def list_calls(stage: int, order: Sequence[Instruction], stages: int) -> list[Call]:
    """Return the sends and receives of a stage in a step, in order."""
    calls: list[Call] = []
    for pass_kind, number in order:
        back = pass_kind == "backward"
        kind: TransferKind = "gradients" if back else "hidden states"
        before, after = (stage + 1, stage - 1) if back else (stage - 1, stage + 1)
        if 0 <= before < stages:
            calls.append(Call(False, kind, number, before))
        if 0 <= after < stages:
            calls.append(Call(True, kind, number, after))
    return calls


def count_blocked_calls(calls: list[list[Call]]) -> int:
    """Count calls that never finish if channels are sequential and sends wait for receives."""
    hosts = [deque(stage_calls) for stage_calls in calls]
    queues: dict[tuple[int, TransferKind], deque[tuple[int, Call]]] = {}
    waiting: list[Call | None] = [None] * len(calls)
    has_progress = True
    while has_progress:
        has_progress = False
        for stage, host in enumerate(hosts):
            while host and waiting[stage] is None:
                call = host.popleft()
                queues.setdefault((stage, call.kind), deque()).append((stage, call))
                waiting[stage] = None if call.sends else call
                has_progress = True
        for (stage, kind), queue in queues.items():
            if not queue:
                continue
            call = queue[0][1]
            peer_queue = queues.get((call.peer, kind))
            if not peer_queue:
                continue
            peer_call = peer_queue[0][1]
            if peer_call.peer != stage or peer_call.sends == call.sends:
                continue
            assert peer_call[1:3] == call[1:3], "one stage sends what the other does not expect"
            queue.popleft()
            peer_queue.popleft()
            for process, done in ((stage, call), (call.peer, peer_call)):
                if not done.sends:
                    waiting[process] = None
            has_progress = True
    return sum(map(len, (*hosts, *queues.values())))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_schedule_has_no_deadlock_if_sends_wait_for_receives(stages: int) -> None:
    for count in (1, stages, 2 * stages, 2 * stages + 1):
        orders = [make_schedule(stage=i, stages=stages, count=count) for i in range(stages)]

        calls = [list_calls(i, order, stages) for i, order in enumerate(orders)]
        assert count_blocked_calls(calls) == 0


def exchange() -> list[list[float]]:
    """Send all kinds before receiving any, each in a separate channel."""
    stages = new_pipeline_group([(0, 1)], timeout_seconds=60.0, has_tags=False)
    groups = (stages, *stages.channels.values())
    assert len({group.process_group for group in groups}) == len(TRANSFER_KINDS) + 1
    transfers, peer = Transfers(stages), 1 - stages.rank
    for number, kind in enumerate(TRANSFER_KINDS):
        tensor = torch.full((3,), 10.0 * stages.rank + number)
        transfers.send(tensor, peer, kind)
    received = [
        transfers.receive(torch.empty(3), peer, kind, micro_batch=number).tolist()
        for number, kind in reversed(list(enumerate(TRANSFER_KINDS)))
    ]
    transfers.wait()
    return received


@pytest.mark.jobs
def test_each_kind_has_a_separate_communicator() -> None:
    first, second = run_ranks(exchange, world_size=2)

    assert first == [[10.0 + n] * 3 for n in (3, 2, 1, 0)]
    assert second == [[float(n)] * 3 for n in (3, 2, 1, 0)]
