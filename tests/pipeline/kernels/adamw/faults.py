"""Faults of the kernel, and the cases that must find each: see `test_faults.py`."""

from pipeline.kernels.adamw.cases import BF16, Case
from tests.pipeline.kernels.adamw.test_cuda import check_ties

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
    *(Case(shift=shift, schedule=schedule) for shift, schedule in [(0, 0), (0, 1), (1, 7)]),
    Case(BF16, BF16, BF16, shift=1),
    Case(BF16, split=True, schedule=7),
]

CHECKS = (lambda emulator: check_ties(Case(split=True), emulator),)
