"""The source of the AdamW kernel, run on the CPU, matches the reference bitwise."""

import dataclasses
import weakref
from collections.abc import Sequence

import pytest
import torch

from pipeline.kernels.adamw import AdamW, Shard, ShardTable, step_scalars
from tests.pipeline.kernels.adamw.cases import (
    STEP,
    Case,
    Inputs,
    clone,
    make_shards,
    reference_step,
)
from tests.pipeline.kernels.emulator.emulated import Emulator

CPU = torch.device("cpu")


def step_with_kernel(shards: Sequence[Shard], step: AdamW, emulator: Emulator) -> None:
    with emulator.memory(*Inputs(list(shards)).tensors()):
        ShardTable(shards, emulator.gpu()).step(step_scalars(step, CPU), step)


@pytest.mark.parametrize(
    ("number", "betas"),
    [(1, (0.4, 0.5)), (1000, (0.0, 0.95)), (11_585, (0.9, 0.999)), (10_000_000, (0.99, 0.999999))],
)
def test_bias_correction_matches_the_reference_bitwise(
    number: int, betas: tuple[float, float], emulator: Emulator
) -> None:
    # Computed by repeated squaring, 0.999999^11585 would have a different correction in fp32.
    step = dataclasses.replace(STEP, step=number, betas=betas, lr=1.0)
    shards = make_shards(Case(), sizes=(400,))
    expected = [clone(shard) for shard in shards]

    reference_step(expected[0], step)
    step_with_kernel(shards, step, emulator)

    tensors = zip(Inputs(shards).tensors(), Inputs(expected).tensors(), strict=True)
    assert all(torch.equal(actual, reference) for actual, reference in tensors)


def test_table_keeps_no_gradient_alive_between_steps(emulator: Emulator) -> None:
    shards = make_shards(Case(), sizes=(400,))
    gradient, table = weakref.ref(shards[0].gradient), ShardTable(shards, emulator.gpu())
    del shards

    assert (table.num_blocks, gradient()) == (1, None)
