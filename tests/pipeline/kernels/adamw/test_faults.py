"""Faults planted in the kernel are found by the cases that test it."""

import pytest

from pipeline.kernels.adamw.cases import BF16, Kind
from pipeline.kernels.emulator.emulated import Emulator
from tests.pipeline.kernels.adamw.test_cuda import check_bits, check_ties

FAULTS = {
    "no barrier before the factors are read": ("  __syncthreads();\n", ""),
    "the tail of a block is left out": (
        "i < count; i += THREADS) update_one",
        "i < done; i += THREADS) update_one",
    ),
    "a block reads beyond its shard": (
        "left < CHUNK ? static_cast<int>(left) : CHUNK",
        "left < CHUNK ? static_cast<int>(left) + 1 : CHUNK",
    ),
    "all blocks update the first shard": (
        "p.shards + load_int(p.shard_of_block + block)",
        "p.shards",
    ),
    "blocks of a shard begin at the first of the launch": (
        "block - load_i64(&shard->first_block)",
        "block - 0",
    ),
    "wide loads of what is not aligned": ("return ends == 0;", "return true;"),
    "decay is not decoupled": ("master = master * f.decay;", ""),
    "the root is not corrected": ("sqrtf(square) / f.root_correction", "sqrtf(square)"),
    "the multiplier is left out": ("* f.multiplier;", ";"),
    "a product and a sum are rounded apart": (
        "square = fmaf(f.sq_weight * gradient, gradient, square * f.beta2);",
        "square = f.sq_weight * gradient * gradient + square * f.beta2;",
    ),
    "the second moment is that of the first": (
        "round_to(square, x.exp_avg_sq);",
        "round_to(average, x.exp_avg_sq);",
    ),
    "weights are rounded down": ("(bits + 0x8000u) >> 16", "bits >> 16"),
    "ties of weights go to even": ("bits + 0x8000u", "bits + 0x7fffu + ((bits >> 16) & 1u)"),
}

SEEN_BY_SELF_TEST = ("* f.multiplier;", ";")
"""Which a GPU that is not the one of the tests might have."""

CASES = [
    *((Kind(), shift, schedule) for shift, schedule in [(0, 0), (0, 1), (1, 7)]),
    (Kind(BF16, BF16, BF16), 1, 0),
    (Kind(BF16, split=True), 0, 7),
]


def is_right(emulator: Emulator) -> bool:
    for kind, shift, schedule in CASES:
        for test in (
            lambda: check_bits(kind, emulator, shift=shift, schedule=schedule),  # noqa: B023
            lambda: check_ties(Kind(split=True), emulator),
        ):
            try:
                test()
            except AssertionError:
                return False
    return True


@pytest.mark.grid
@pytest.mark.parametrize(
    "planted", [("adamw", each) for each in FAULTS.values()], ids=list(FAULTS), indirect=True
)
@pytest.mark.usefixtures("planted")
def test_a_planted_fault_is_found(emulator: Emulator) -> None:
    assert not is_right(emulator)


@pytest.mark.grid
def test_without_a_planted_fault_the_same_cases_pass(emulator: Emulator) -> None:
    assert is_right(emulator)
