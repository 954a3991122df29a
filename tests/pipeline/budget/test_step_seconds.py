"""Seconds of an optimizer step, against sums by hand."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.budget.flops import model_flops
from pipeline.budget.machine import GIB, Machine
from pipeline.budget.models import models_of
from pipeline.budget.step_seconds import Links, StepSeconds, links_of, step_seconds
from pipeline.config import EMBEDDED, DataConfig, ParallelConfig, TrainedModelConfig
from pipeline.config.zero import OffloadConfig, ZeroConfig
from step1_sft.config import SFTConfig

LINKS = Links(operations=1e9, within=1e6, away=1e5, message=0.0)
ROWS, LENGTH, WIDTH, BLOCKS = 32, 64, 128, 4


def seconds(
    machine: Machine, links: Links = LINKS, *, model: dict[str, Any] | None = None, **parallel: Any
) -> StepSeconds:
    config = SFTConfig(
        model=TrainedModelConfig(path=EMBEDDED, **(model or {"zero_stage": 0})),
        data=DataConfig(max_length=LENGTH),
        batch_size=ROWS,
        micro_batch_size=4,
        parallel=ParallelConfig(**parallel),
    )
    workload = config.workload(machine.world)
    models = models_of(workload, {}, has_gpu=machine.has_gpu)
    return step_seconds(models, workload, machine, links)


def cpus(processes: int, world: int) -> Machine:
    return Machine(processes, world, None, None)


def operations(*, recomputes: bool = False) -> int:
    workload = SFTConfig(model=TrainedModelConfig(path=EMBEDDED)).workload(1)
    (model,) = models_of(workload, {}, has_gpu=False)
    return ROWS * LENGTH * model_flops(model.present).train(LENGTH, recomputes=recomputes)


def test_one_process_computes_and_nothing_else() -> None:
    assert seconds(cpus(1, 1)) == StepSeconds(computing=operations() / 1e9)
    recomputing = {"zero_stage": 0, "gradient_checkpointing": True}
    again = seconds(cpus(1, 1), model=recomputing)
    assert again == StepSeconds(computing=operations(recomputes=True) / 1e9)


def test_stages_wait_for_each_other_and_hand_on_hidden_states() -> None:
    hidden = ROWS * LENGTH * WIDTH * 4  # a pipeline has all rows
    within, between = (seconds(cpus(each, 2), pp=2, micro_batches=8) for each in (2, 1))

    computing = operations() / 2 / 1e9
    assert within.computing == pytest.approx(computing)
    assert within.waiting == pytest.approx(computing / 8)  # (2 - 1) / 8 micro-batches
    assert within.edges == pytest.approx(2 * hidden / 1e6)
    assert between.edges == pytest.approx(2 * hidden / 1e5)
    assert within.layers == within.states == 0


def test_layers_that_are_computed_together_exchange_hidden_states() -> None:
    hidden = ROWS * LENGTH * WIDTH * 4
    by_tokens, whole = (seconds(cpus(2, 2), tp=2, sequence=each) for each in (True, False))

    assert by_tokens.layers == pytest.approx(2 * BLOCKS * 5 / 2 * hidden / 1e6)
    assert whole.layers == pytest.approx(2 * BLOCKS * 2 * hidden / 1e6)
    assert by_tokens.computing == pytest.approx(operations() / 2 / 1e9)


def test_states_go_over_the_network_where_those_that_share_them_are_on_several_machines() -> None:
    for stage in (1, 3):
        near, far = (seconds(cpus(n, 2), model={"zero_stage": stage}) for n in (2, 1))
        assert far.states == pytest.approx(10 * near.states) != 0
    hybrid, whole = (seconds(cpus(2, 4), model={"zero_stage": 3}, replicas=each) for each in (2, 1))
    assert hybrid.states < whole.states / 2  # gradients alone leave a machine


def test_each_exchange_takes_a_while_however_short() -> None:
    slow = replace(LINKS, message=1.0)

    def more(**parallel: Any) -> float:
        return seconds(cpus(2, 2), slow, **parallel).total - seconds(cpus(2, 2), **parallel).total

    assert more(pp=2, micro_batches=8) == pytest.approx(2 * 8)
    # Five gathers and sums in the attention and the MLP of each block, for each micro-batch.
    assert more(tp=2) == pytest.approx(2 * BLOCKS * 5 * 8)


def test_what_lies_in_main_memory_is_fetched() -> None:
    gpus = Machine(2, 2, 80 * GIB, 512 * GIB)
    offload = OffloadConfig(optimizer="cpu", gradients="cpu")
    away = {"zero_stage": 2, "zero": ZeroConfig(offload=offload)}
    links = links_of(gpus, "2xH100-80GB")
    here, there = (seconds(gpus, links, model=each) for each in ({"zero_stage": 2}, away))

    assert here.main_memory == 0 < there.main_memory
    assert here.computing == there.computing
