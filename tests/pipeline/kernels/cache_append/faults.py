"""Faults of the kernel, and the cases that must find each: see `test_faults.py`."""

from pipeline.kernels.cache_append.cases import QUICK

FAULTS = {
    "tokens in no slot are stored": (
        "if (place < 0 || place >= p.num_slots * p.width) return;",
        "if (place < 0) return;",
    ),
    "slots and positions change places": (
        "(slot * p.num_heads + head) * p.width + position",
        "(position * p.num_heads + head) * p.width + slot",
    ),
    "the heads beyond a block are left": ("at < p.num_heads * of_both", "at < 16 * blockDim.x"),
    "values are taken for keys": (
        "const bool is_key = byte < of_key;",
        "const bool is_key = true;",
    ),
    "heads lie as tokens do": (
        "head * of_head + token * of_token",
        "head * of_token + token * of_head",
    ),
    "values begin where keys end": (": byte - of_key;", ": byte;"),
    "half of the loads": ("at += 16 * blockDim.x", "at += 32 * blockDim.x"),
}

SEEN_BY_SELF_TEST = ("token * of_token", "0 * of_token")
"""Which a GPU that is not the one of the tests might have."""

CASES = QUICK
