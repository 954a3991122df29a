"""Schedules: the orders that PyTorch's pipelines run, without a deadlock, in the time of theory."""

from itertools import product

import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    _ComputationType,
)

from pipeline.parallel.schedules import (
    DeadlockError,
    Instruction,
    Schedule,
    bubble,
    instructions,
    simulate,
)

OF_PYTORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
KINDS = {_ComputationType.FORWARD: "forward", _ComputationType.FULL_BACKWARD: "backward"}


def of_all(schedule: Schedule, stages: int, count: int) -> list[list[Instruction]]:
    return [
        instructions(schedule, stage=stage, stages=stages, count=count) for stage in range(stages)
    ]


def of_pytorch(schedule: str, stages: int, count: int) -> list[list[tuple[str, int]]]:
    made = OF_PYTORCH[schedule].__new__(OF_PYTORCH[schedule])
    made._num_stages, made._n_microbatches = stages, count
    order = made._get_pipeline_order()
    assert order is not None
    found = [
        [
            (KINDS[action.computation_type], action.microbatch_index)
            for action in order[stage]
            if action is not None and action.computation_type in KINDS
        ]
        for stage in range(stages)
    ]
    if schedule == "1f1b":  # whose list of the last stage counts forward passes from 1 on
        found[-1] = [(kind, each - (kind == "forward")) for kind, each in found[-1]]
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_orders_are_those_of_pytorch(schedule: Schedule) -> None:
    for stages in range(1, 9):
        for count in range(stages, 33):
            assert of_all(schedule, stages, count) == of_pytorch(schedule, stages, count)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_they_end_in_the_time_and_memory_of_theory_with_any_number_of_micro_batches(
    schedule: Schedule,
) -> None:
    for stages, count in product(range(1, 9), range(1, 33)):
        found = simulate(of_all(schedule, stages, count))

        assert found.seconds == 3 * (count + stages - 1)
        assert found.bubble == pytest.approx(bubble(stages, count), abs=1e-12)
        kept = [count if schedule == "gpipe" else min(stages - n, count) for n in range(stages)]
        assert found.kept == kept


def test_a_timetable_by_hand() -> None:
    # Two stages, two micro-batches: forward takes 1, backward 2.
    first, second = simulate(of_all("1f1b", 2, 2)).starts

    assert [*first.items()] == [
        (("forward", 0), 0.0),
        (("forward", 1), 1.0),
        (("backward", 0), 4.0),
        (("backward", 1), 7.0),
    ]
    assert [*second.items()] == [
        (("forward", 0), 1.0),
        (("backward", 0), 2.0),
        (("forward", 1), 4.0),
        (("backward", 1), 5.0),
    ]


def test_lists_that_wait_for_each_other_are_found() -> None:
    backward_first = [Instruction("backward", 0), Instruction("forward", 0)]

    with pytest.raises(DeadlockError, match="stage 0 at"):
        simulate([backward_first, of_all("1f1b", 2, 1)[1]])
