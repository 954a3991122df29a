"""Faults planted in the kernel are found by the cases that test it."""

import pytest
import torch

from pipeline.kernels.cache_append import cases
from pipeline.kernels.emulator.emulated import Emulator

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


def is_right(emulator: Emulator) -> bool:
    for case in cases.CASES:
        inputs = cases.inputs_of(case, torch.device("cpu"))
        try:
            with emulator.memory(*inputs.tensors(), schedule=case.schedule):
                if not cases.is_right(inputs, emulator.gpu()):
                    return False
        except AssertionError:
            return False
    return True


@pytest.mark.grid
@pytest.mark.parametrize(
    "planted", [("cache_append", each) for each in FAULTS.values()], ids=list(FAULTS), indirect=True
)
@pytest.mark.usefixtures("planted")
def test_a_planted_fault_is_found(emulator: Emulator) -> None:
    assert not is_right(emulator)


@pytest.mark.grid
def test_without_a_planted_fault_the_same_cases_pass(emulator: Emulator) -> None:
    assert is_right(emulator)
