"""1F1B: the order that PyTorch's pipelines run, without a deadlock, in the time of theory."""

from itertools import product

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B, _ComputationType

from pipeline.parallel.schedules import Instruction, bubble_fraction, make_schedule, max_in_flight

KINDS = {_ComputationType.FORWARD: "forward", _ComputationType.FULL_BACKWARD: "backward"}

TIMES = {"forward": 1.0, "backward": 2.0}
"""Duration of a pass on any stage: a backward pass has twice the products."""


def timetable(stages: int, count: int) -> list[dict[Instruction, float]]:
    """The time at which each stage starts each of its passes, by `TIMES`."""
    left = [make_schedule(stage=stage, stages=stages, count=count) for stage in range(stages)]
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


def of_pytorch(stages: int, count: int) -> list[list[tuple[str, int | None]]]:
    made = Schedule1F1B.__new__(Schedule1F1B)
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
    # Its list of the last stage counts forward passes from 1 on.
    found[-1] = [(kind, (each or 0) - (kind == "forward")) for kind, each in found[-1]]
    return found


def test_the_orders_are_those_of_pytorch() -> None:
    for stages in range(1, 9):
        for count in range(stages, 33):
            assert [
                make_schedule(stage=stage, stages=stages, count=count) for stage in range(stages)
            ] == of_pytorch(stages, count)


def test_they_end_in_the_time_of_theory_with_any_number_of_micro_batches() -> None:
    for stages, count in product(range(1, 9), range(1, 33)):
        starts = timetable(stages, count)
        ends = [start + TIMES[at.kind] for of_stage in starts for at, start in of_stage.items()]

        assert len(ends) == 2 * stages * count
        assert max(ends) == 3 * (count + stages - 1)
        busy = sum(TIMES[at.kind] for of_stage in starts for at in of_stage)
        assert 1 - busy / (stages * max(ends)) == pytest.approx(
            bubble_fraction(stages, count), abs=1e-12
        )


def test_a_timetable_by_hand() -> None:
    # Two stages, two micro-batches: forward takes 1, backward 2.
    first, second = timetable(2, 2)

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


def test_tensors_are_received_before_a_stage_must_wait_for_them() -> None:
    """The timetable is a run in which no stage waits for the arrival of what it has sent."""
    for stages, count in product((2, 3, 4, 8), (1, 2, 5, 16, 33)):
        starts = timetable(stages, count)
        for stage, passes in enumerate(starts):
            sent: list[tuple[float, float]] = []  # when, and when the receiver's pass begins
            for at, start in passes.items():
                to = [stage + 1 if at.kind == "forward" else stage - 1]
                # Tied gradients go from the last stage to the first.
                to += [0] if at.kind == "backward" and stage == stages - 1 else []
                sent += [(start, starts[other][at]) for other in to if 0 <= other < stages]
            for number, (_, received) in enumerate(sent):
                later = [start for start, _ in sent[number + 1 :] if start < received]
                assert len(later) < max_in_flight(stages)
