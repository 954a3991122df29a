"""AdamW: the kernel's own source, run on the CPU, against the reference to the bit and float64."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipeline.kernels.adamw import definition
from pipeline.kernels.adamw.cuda import ShardTable, adamw_, scalars_of
from pipeline.kernels.adamw.definition import AdamW, Shard, Weights
from tests.pipeline.kernels.adamw.cases import (
    BF16,
    F16,
    F32,
    STEP,
    Case,
    Inputs,
    by_definition,
    copied,
    shard_of,
    shards_of,
)
from tests.pipeline.kernels.emulator.emulated import Emulator

CPU = torch.device("cpu")


def by_kernel(
    shards: Sequence[Shard], step: AdamW, emulator: Emulator, *, schedule: int = 0
) -> None:
    with emulator.memory(*Inputs(list(shards)).tensors(), schedule=schedule):
        adamw_(
            ShardTable(shards, emulator.gpu()),
            scalars_of(step, CPU),
            betas=step.betas,
            eps=step.eps,
        )


def assert_equal(ours: Sequence[Shard], theirs: Sequence[Shard]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        expected = other.weights.tensors()
        for name, tensor in one.weights.tensors().items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("gradient", [F32, BF16, F16], ids=str)
def test_a_step_is_that_of_the_formula_in_float64(
    gradient: torch.dtype, emulator: Emulator
) -> None:
    shard = shard_of(Case(gradient), 1000, seed=1)
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


@pytest.mark.parametrize("step", [1, 2, 10, 999, 1000, 11_585, 10_000_000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.5), (0.0, 0.95), (0.99, 0.999999)])
def test_bias_is_corrected_with_the_bits_of_the_reference_at_any_step(
    step: int, betas: tuple[float, float], emulator: Emulator
) -> None:
    # Multiplied by squares, 0.999999^11585 is a number whose correction has other bits in fp32.
    numbers = dataclasses.replace(STEP, step=step, betas=betas, lr=1.0)
    ours = shards_of(Case(), sizes=(400,))
    theirs = [copied(shard) for shard in ours]

    by_definition(theirs[0], numbers)
    by_kernel(ours, numbers, emulator)

    assert_equal(ours, theirs)


def test_what_is_not_finite_stays_so(emulator: Emulator) -> None:
    ours = shards_of(Case(F32, copy=BF16), sizes=(64,))
    ours[0].gradient[3] = math.inf
    ours[0].weights.master[5] = -math.inf

    by_kernel(ours, STEP, emulator)

    copy = ours[0].weights.copy
    assert copy is not None
    assert copy[3].isnan()
    assert copy[5] == -math.inf
    assert copy.isfinite().sum() == 62


@pytest.mark.parametrize("kind", [Case(copy=BF16), Case(split=True)], ids=str)
def test_a_weight_half_way_between_two_is_rounded_away_from_zero(
    kind: Case, emulator: Emulator
) -> None:
    check_ties(kind, emulator)


def check_ties(kind: Case, emulator: Emulator) -> None:
    masters = torch.tensor([0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x7FC00000]).int()
    master, copy, low_bits = masters.view(F32), torch.zeros(5, dtype=BF16), None
    if kind.split:
        copy, low_bits = definition.split_master(master)
        weights = Weights(copy, *torch.zeros(2, 5), low_bits=low_bits)
    else:
        weights = Weights(master, *torch.zeros(2, 5), copy)

    shard = Shard(weights=weights, gradient=torch.zeros(5), lr=1.0, weight_decay=0.0)

    by_kernel([shard], STEP, emulator)

    bits = [each & 0xFFFF for each in copy.view(torch.int16).tolist()]
    assert bits == [0x3F81, 0x3F82, 0xBF81, 0x3F80, 0x7FC0]


def test_shards_of_one_launch_are_of_one_kind(emulator: Emulator) -> None:
    shards = [*shards_of(Case(), sizes=(4,)), *shards_of(Case(BF16), sizes=(4,))]

    with pytest.raises(ValueError, match="same dtypes"):
        ShardTable(shards, emulator.gpu())


BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "dtype": ({"master": torch.zeros(4, dtype=F16)}, "master must be torch.float32"),
    "length": ({"gradient": torch.zeros(5)}, r"master has shape \(4,\)"),
    "stride": ({"exp_avg_sq": torch.zeros(8)[::2]}, r"exp_avg_sq has stride \(2,\)"),
    "copy": ({"copy": torch.zeros(4)}, "copy must be torch.bfloat16 or torch.float16"),
    "device": ({"copy": torch.zeros(4, dtype=F16, device="meta")}, "copy has shape .* on meta"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_shard_that_the_kernel_can_not_take_is_named(what: str, emulator: Emulator) -> None:
    changes, message = BAD[what]
    good, bad = shards_of(Case(), sizes=(4, 4))
    tensors = bad.weights.tensors() | {"gradient": bad.gradient} | changes
    gradient = tensors.pop("gradient")
    bad = dataclasses.replace(bad, weights=Weights(**tensors), gradient=gradient)

    with pytest.raises(ValueError, match=f"shard 1: .*{message}"):
        ShardTable([good, bad], emulator.gpu())


def test_a_shard_between_two_places_of_memory_is_named(emulator: Emulator) -> None:
    (shard,) = shards_of(Case(), sizes=(4,))
    odd = torch.frombuffer(bytearray(18), dtype=F32, count=4, offset=1)

    with pytest.raises(ValueError, match="shard 0: gradient begins between"):
        ShardTable([dataclasses.replace(shard, gradient=odd)], emulator.gpu())


def test_a_shard_on_another_device_than_the_kernel_is_named(emulator: Emulator) -> None:
    (shard,) = shards_of(Case(), sizes=(4,))
    tensors = {name: each.to("meta") for name, each in shard.weights.tensors().items()}
    there = dataclasses.replace(
        shard, weights=Weights(**tensors), gradient=shard.gradient.to("meta")
    )

    with pytest.raises(ValueError, match="shard 0 is on meta, the kernel on cpu"):
        ShardTable([there], emulator.gpu())


def test_no_shard_is_no_launch(emulator: Emulator) -> None:
    with pytest.raises(ValueError, match="a shard"):
        ShardTable([], emulator.gpu())

    by_kernel(shards_of(Case(), sizes=(0,)), STEP, emulator)
