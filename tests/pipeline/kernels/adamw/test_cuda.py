"""AdamW: the kernel's own source, run on the CPU, against the reference to the bit and float64."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from pipeline.kernels.adamw import AdamW, Shard, ShardTable, step_scalars
from tests.pipeline.kernels.adamw.cases import (
    BF16,
    F16,
    F32,
    STEP,
    Case,
    Inputs,
    by_definition,
    copied,
    make_shard,
    make_shards,
)
from tests.pipeline.kernels.emulator.emulated import Emulator

CPU = torch.device("cpu")


def by_kernel(
    shards: Sequence[Shard], step: AdamW, emulator: Emulator, *, schedule: int = 0
) -> None:
    with emulator.memory(*Inputs(list(shards)).tensors(), schedule=schedule):
        ShardTable(shards, emulator.gpu()).step(step_scalars(step, CPU), step)


def assert_equal(ours: Sequence[Shard], theirs: Sequence[Shard]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        expected = other.weights.tensors()
        for name, tensor in one.weights.tensors().items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("gradient", [F32, BF16, F16], ids=str)
def test_a_step_is_that_of_the_formula_in_float64(
    gradient: torch.dtype, emulator: Emulator
) -> None:
    shard = make_shard(Case(gradient), 1000, seed=1)
    weights = {name: each.double() for name, each in shard.weights.tensors().items()}
    grad = 0.25 * shard.gradient.double()

    by_kernel([shard], STEP, emulator)

    exp_avg = 0.9 * weights["exp_avg"] + 0.1 * grad
    exp_avg_sq = 0.95 * weights["exp_avg_sq"] + 0.05 * grad**2
    root = (exp_avg_sq / (1 - 0.95**5)).sqrt() + 1e-8
    lr = 2 * 1e-2
    master = (1 - lr * 0.1) * weights["master"] - lr * exp_avg / (1 - 0.9**5) / root
    torch.testing.assert_close(shard.weights.master.double(), master, rtol=0, atol=5e-7)
    torch.testing.assert_close(shard.weights.exp_avg.double(), exp_avg, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(shard.weights.exp_avg_sq.double(), exp_avg_sq, rtol=1e-6, atol=0)


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
