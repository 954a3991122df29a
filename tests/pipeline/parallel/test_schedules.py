"""Schedules: the orders that PyTorch's pipelines run, without a deadlock, in the time of theory."""

from itertools import product

import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    _ComputationType,
)

from pipeline.parallel.schedules import (
    Instruction,
    Schedule,
    bubble,
    most_sent,
    orders_of,
    simulate,
)

OF_PYTORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
KINDS = {_ComputationType.FORWARD: "forward", _ComputationType.FULL_BACKWARD: "backward"}


def of_all(schedule: Schedule, stages: int, count: int, chunks: int = 1) -> list[list[Instruction]]:
    return orders_of(schedule, stages=stages, count=count, chunks=chunks)


def of_pytorch(schedule: str, stages: int, count: int) -> list[list[tuple[str, int, int]]]:
    made = OF_PYTORCH[schedule].__new__(OF_PYTORCH[schedule])
    made._num_stages, made._n_microbatches = stages, count
    order = made._get_pipeline_order()
    assert order is not None
    found = [
        [
            (KINDS[action.computation_type], action.microbatch_index, 0)
            for action in order[stage]
            if action is not None and action.computation_type in KINDS
        ]
        for stage in range(stages)
    ]
    if schedule == "1f1b":  # whose list of the last stage counts forward passes from 1 on
        found[-1] = [(kind, each - (kind == "forward"), 0) for kind, each, _ in found[-1]]
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_orders_are_those_of_pytorch(schedule: Schedule) -> None:
    for stages in range(1, 9):
        for count in range(stages, 33):
            assert of_all(schedule, stages, count) == of_pytorch(schedule, stages, count)


def interleaved_of_pytorch(
    stages: int, count: int, chunks: int
) -> list[list[tuple[str, int, int]]] | None:
    """None where PyTorch's has no order for that number of micro-batches."""
    made = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    made.pp_group_size, made.n_local_stages = stages, chunks
    made._n_microbatches = count
    made.number_of_rounds = max(1, count // stages)
    made.microbatches_per_round = count // made.number_of_rounds
    if count % made.number_of_rounds:
        return None
    orders = [made._calculate_single_rank_operations(stage) for stage in range(stages)]
    return [
        [
            (KINDS[action.computation_type], action.microbatch_index, action.stage_index // stages)
            for action in order
            if action is not None
        ]
        for order in orders
    ]


def test_the_interleaved_orders_are_those_of_pytorch_where_it_has_one() -> None:
    known = 0
    for stages, chunks, count in product(range(1, 9), range(2, 5), range(1, 33)):
        expected = interleaved_of_pytorch(stages, count, chunks)
        if expected is not None:
            assert of_all("interleaved", stages, count, chunks) == expected
            known += 1

    assert known > 300


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_they_end_in_the_time_and_memory_of_theory_with_any_number_of_micro_batches(
    schedule: Schedule,
) -> None:
    for stages, count in product(range(1, 9), range(1, 33)):
        found = simulate(of_all(schedule, stages, count))

        assert found.seconds == 3 * (count + stages - 1)
        assert found.bubble == pytest.approx(bubble(schedule, stages, count), abs=1e-12)
        kept = [count if schedule == "gpipe" else min(stages - n, count) for n in range(stages)]
        assert found.kept == kept


def test_a_timetable_by_hand() -> None:
    # Two stages, two micro-batches: forward takes 1, backward 2.
    first, second = simulate(of_all("1f1b", 2, 2)).starts

    assert [*first.items()] == [
        (Instruction("forward", 0), 0.0),
        (Instruction("forward", 1), 1.0),
        (Instruction("backward", 0), 4.0),
        (Instruction("backward", 1), 7.0),
    ]
    assert [*second.items()] == [
        (Instruction("forward", 0), 1.0),
        (Instruction("backward", 0), 2.0),
        (Instruction("forward", 1), 4.0),
        (Instruction("backward", 1), 5.0),
    ]


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3)])
def test_tensors_are_received_before_a_stage_must_wait_for_them(
    schedule: Schedule, chunks: int
) -> None:
    """The timetable is a run in which no stage waits for the arrival of what it has sent."""
    for stages, count in product((2, 3, 4, 8), (1, 2, 5, 16, 33)):
        starts = simulate(of_all(schedule, stages, count, chunks)).starts
        last = stages * chunks - 1
        for stage, passes in enumerate(starts):
            sent: list[tuple[float, float]] = []  # when, and when the receiver's pass begins
            for each, start in passes.items():
                place = each.chunk * stages + stage
                to = [place + 1 if each.kind == "forward" else place - 1]
                to += [0] if each.kind == "backward" and place == last else []  # tied gradients
                for chunk, other in (divmod(n, stages) for n in to if 0 <= n <= last):
                    taken = Instruction(each.kind, each.micro_batch, chunk)
                    sent.append((start, starts[other][taken]))
            for number, (_, received) in enumerate(sent):
                later = [start for start, _ in sent[number + 1 :] if start < received]
                assert len(later) < most_sent(stages, chunks)
