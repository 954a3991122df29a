"""Faults of the kernel, and the cases that must find each: see `test_faults.py`."""

import itertools

from pipeline.kernels.decode_attention.cases import BF16, F32, RAGGED, Case
from pipeline.kernels.emulator.emulated import SCHEDULES

FAULTS = {
    "no barrier before shared memory is read": ("  __syncthreads();\n  for", "  for"),
    "a barrier that half of the warps come to": (
        "  __syncthreads();\n  for",
        "  if (warp < 2) __syncthreads();\n  for",
    ),
    "a shuffle that lanes past the end don't come to": (
        "for (int other = LANES / 2; other > 0; other /= 2)",
        "for (int other = token < keys.end ? LANES / 2 : 0; other > 0; other /= 2)",
    ),
    "keys past the end take part": ("if (token >= keys.end) score[a][g] = MINUS_INFINITY;", ""),
    "keys past the end are read": (
        "const bool real = token < keys.end && load < LOADS;",
        "const bool real = load < LOADS;",
    ),
    "a split ends one key early": (
        "min(end, first + count)}",
        "min(end, first + count - 1)}",
    ),
    "the window is one token short": (
        "? length - p.window : 0",
        "? length - p.window + 1 : 0",
    ),
    "tokens and heads change places": ("token * p.key_token", "token * p.key_head"),
    "a softmax without keys is not guarded": (
        "return highest == MINUS_INFINITY ? 0.f : highest;",
        "return highest;",
    ),
    "splits are put together without their maxima": (
        "const float share = exp2_fast(read(part + HEAD_SIZE) - zero);",
        "const float share = 1.f;",
    ),
    "warps are put together without their maxima": (
        "const float share = exp2_fast(shared_weights[row * 2] - zero);",
        "const float share = 1.f;",
    ),
    "arrays of shared memory overlap": (
        "shared + WARPS * GROUP * HEAD_SIZE;",
        "shared + WARPS * GROUP * HEAD_SIZE - 2;",
    ),
    "shared memory is left": (
        "shared + WARPS * GROUP * HEAD_SIZE;",
        "shared + WARPS * GROUP * HEAD_SIZE + 2;",
    ),
    "half of a warp is not put together": ("other < 32; other *= 2", "other < 16; other *= 2"),
    "query heads are taken in another order": (
        "const int first_head = kv_head * p.heads_per_kv + first_of_kv;",
        "const int first_head = kv_head + first_of_kv;",
    ),
    "a load begins one number late": (
        "load16_once(key + token * p.key_token + load * PER_LOAD)",
        "load16_once(key + token * p.key_token + load * PER_LOAD + 1)",
    ),
    "sums are not shrunk by a new maximum": (
        "sums.values[g][e] *= shrink;",
        "sums.values[g][e] *= 1.f;",
    ),
    "the last of the query heads is written twice": (
        "i < num_heads * HEAD_SIZE;",
        "i < (num_heads + 1) * HEAD_SIZE;",
    ),
}

SEEN_BY_SELF_TEST = ("if (token >= keys.end) score[a][g] = MINUS_INFINITY;", "")
"""Which a GPU that is not the one of the tests might have."""

CASES = [
    *(
        Case(F32, 64, 3, 1, RAGGED, num_splits=splits, schedule=order)
        for splits, order in itertools.product((1, 3), SCHEDULES)
    ),
    Case(F32, 64, 3, 1, RAGGED, window=40, num_splits=1),
    Case(F32, 80, 9, 1, RAGGED, num_splits=2),
    Case(BF16, 64, 6, 2, RAGGED, num_splits=2),
]
