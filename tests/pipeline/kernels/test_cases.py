"""GPU kernels, run on the CPU by the emulator, match their definitions."""

from importlib import import_module
from typing import Any

import pytest
import torch

from tests.pipeline.kernels.emulator.emulated import Emulator

OPERATORS = ("adamw", "cache_append", "decode_attention", "sampling")

CASES = {name: import_module(f"tests.pipeline.kernels.{name}.cases") for name in OPERATORS}

QUICK = [(name, case) for name in OPERATORS for case in CASES[name].QUICK]
GRID = [(name, case) for name in OPERATORS for case in CASES[name].GRID]


def is_correct(name: str, case: Any, emulator: Emulator) -> bool:
    cases, device = CASES[name], torch.device("cpu")
    inputs = cases.make_inputs(case, device)
    with emulator.memory(*inputs.tensors(), schedule=case.schedule):
        out = cases.run(case, inputs, emulator.gpu())
    return cases.is_correct(case, cases.make_inputs(case, device), out)


@pytest.mark.parametrize(("name", "case"), QUICK, ids=str)
def test_kernel_matches_its_definition(name: str, case: Any, emulator: Emulator) -> None:
    assert is_correct(name, case, emulator)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "case"), [case for case in GRID if case not in QUICK][::7], ids=str
)
def test_kernel_matches_its_definition_on_the_whole_grid(
    name: str, case: Any, emulator: Emulator
) -> None:
    assert is_correct(name, case, emulator)
