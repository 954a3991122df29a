"""1F1B schedules match PyTorch's, and partitions of blocks match an exhaustive search."""

from itertools import combinations, pairwise, product

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B, _ComputationType

from pipeline.parallel.schedules import (
    Instruction,
    balance_stages,
    bubble_fraction,
    make_schedule,
    max_in_flight,
)

KINDS = {_ComputationType.FORWARD: "forward", _ComputationType.FULL_BACKWARD: "backward"}

TIMES = {"forward": 1.0, "backward": 2.0}
"""Duration of a pass on any stage; a backward pass has twice the matrix products."""


def timetable(stages: int, count: int) -> list[dict[Instruction, float]]:
    """Return the times at which each stage starts its passes, according to `TIMES`."""
    remaining = [make_schedule(stage=stage, stages=stages, count=count) for stage in range(stages)]
    starts: list[dict[Instruction, float]] = [{} for _ in range(stages)]
    free = [0.0] * stages
    while any(remaining):
        for stage, passes in enumerate(remaining):
            while passes:
                call = passes[0]
                source = stage - 1 if call.kind == "forward" else stage + 1
                ready = 0.0
                if 0 <= source < stages:
                    if call not in starts[source]:
                        break
                    ready = starts[source][call] + TIMES[call.kind]
                starts[stage][call] = max(free[stage], ready)
                free[stage] = starts[stage][call] + TIMES[call.kind]
                del passes[0]
    return starts


def get_pytorch_order(stages: int, count: int) -> list[list[tuple[str, int | None]]]:
    schedule = Schedule1F1B.__new__(Schedule1F1B)
    schedule._num_stages, schedule._n_microbatches = stages, count
    order = schedule._get_pipeline_order()
    assert order is not None
    orders = [
        [
            (KINDS[action.computation_type], action.microbatch_index)
            for action in order[stage]
            if action is not None and action.computation_type in KINDS
        ]
        for stage in range(stages)
    ]
    # It counts the forward passes of the last stage from 1.
    orders[-1] = [(kind, (number or 0) - (kind == "forward")) for kind, number in orders[-1]]
    return orders


def test_order_matches_pytorch() -> None:
    for stages in range(1, 9):
        for count in range(stages, 33):
            assert [
                make_schedule(stage=stage, stages=stages, count=count) for stage in range(stages)
            ] == get_pytorch_order(stages, count)


def test_step_takes_the_theoretical_time() -> None:
    for stages, count in product(range(1, 9), range(1, 33)):
        starts = timetable(stages, count)
        ends = [start + TIMES[call.kind] for passes in starts for call, start in passes.items()]

        assert len(ends) == 2 * stages * count
        assert max(ends) == 3 * (count + stages - 1)
        busy = sum(TIMES[call.kind] for passes in starts for call in passes)
        assert 1 - busy / (stages * max(ends)) == pytest.approx(
            bubble_fraction(stages, count), abs=1e-12
        )


def test_timetable_matches_a_hand_computed_one() -> None:
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


def test_stages_never_wait_for_receipt_of_what_they_sent() -> None:
    """In the timetable, no stage waits until the tensors that it sent are received."""
    for stages, count in product((2, 3, 4, 8), (1, 2, 5, 16, 33)):
        starts = timetable(stages, count)
        for stage, passes in enumerate(starts):
            sent: list[tuple[float, float]] = []  # start of the sender's and of the receiver's pass
            for call, start in passes.items():
                targets = [stage + 1 if call.kind == "forward" else stage - 1]
                # Tied gradients go from the last stage to the first.
                targets += [0] if call.kind == "backward" and stage == stages - 1 else []
                sent += [(start, starts[to][call]) for to in targets if 0 <= to < stages]
            for number, (_, received) in enumerate(sent):
                later = [start for start, _ in sent[number + 1 :] if start < received]
                assert len(later) < max_in_flight(stages)


def search_all(costs: list[float], stages: int, last: float) -> list[int]:
    """Return the first partition with the smallest costs of the slowest stages."""
    candidates: list[tuple[list[float], list[int]]] = []
    for ends in combinations(range(1, len(costs)), stages - 1):
        parts = [costs[a:b] for a, b in pairwise([0, *ends, len(costs)])]
        sums = [*map(sum, parts[:-1]), sum(parts[-1]) + last]
        candidates.append((sorted(sums, reverse=True), [*map(len, parts)]))
    return min(candidates)[1]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("last", [0, 3])
@pytest.mark.parametrize("costs", [[1] * 7, [1, 2, 3, 4, 5, 6, 7], [9, 1, 1, 1, 1, 4, 2, 2]])
def test_partition_minimizes_the_cost_of_the_slowest_stage(
    costs: list[float], last: float, stages: int
) -> None:
    assert balance_stages(costs, stages, last=last) == search_all(costs, stages, last)
