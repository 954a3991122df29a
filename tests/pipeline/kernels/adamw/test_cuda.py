"""AdamW: the kernel's own source, run on the CPU, against the reference to the bit."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from pipeline.kernels.adamw import AdamW, Shard, ShardTable, step_scalars
from tests.pipeline.kernels.adamw.cases import (
    STEP,
    Case,
    Inputs,
    by_definition,
    copied,
    make_shards,
)
from tests.pipeline.kernels.emulator.emulated import Emulator

CPU = torch.device("cpu")


def by_kernel(shards: Sequence[Shard], step: AdamW, emulator: Emulator) -> None:
    with emulator.memory(*Inputs(list(shards)).tensors()):
        ShardTable(shards, emulator.gpu()).step(step_scalars(step, CPU), step)


def assert_equal(ours: Sequence[Shard], theirs: Sequence[Shard]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        expected = other.weights.tensors()
        for name, tensor in one.weights.tensors().items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("step", "betas"),
    [(1, (0.4, 0.5)), (1000, (0.0, 0.95)), (11_585, (0.9, 0.999)), (10_000_000, (0.99, 0.999999))],
)
def test_bias_is_corrected_with_the_bits_of_the_reference_at_any_step(
    step: int, betas: tuple[float, float], emulator: Emulator
) -> None:
    # Multiplied by squares, 0.999999^11585 is a number whose correction has other bits in fp32.
    numbers = dataclasses.replace(STEP, step=step, betas=betas, lr=1.0)
    ours = make_shards(Case(), sizes=(400,))
    theirs = [copied(shard) for shard in ours]

    by_definition(theirs[0], numbers)
    by_kernel(ours, numbers, emulator)

    assert_equal(ours, theirs)
