"""Kernels for GPUs, their own sources run on the CPU: they compute what the definitions do."""

from typing import Any

import pytest

from pipeline.kernels.emulator.emulated import Emulator
from pipeline.kernels.operators import cases_of, operators
from tests.pipeline.kernels.emulation import is_right

QUICK = [(name, case) for name in operators(on_gpu=True) for case in cases_of(name).QUICK]
GRID = [(name, case) for name in operators(on_gpu=True) for case in cases_of(name).GRID]


@pytest.mark.parametrize(("name", "case"), QUICK, ids=str)
def test_the_kernel_computes_what_the_definition_does(
    name: str, case: Any, emulator: Emulator
) -> None:
    assert is_right(name, case, emulator)


@pytest.mark.grid
@pytest.mark.parametrize(("name", "case"), [each for each in GRID if each not in QUICK], ids=str)
def test_the_kernel_computes_what_the_definition_does_everywhere(
    name: str, case: Any, emulator: Emulator
) -> None:
    assert is_right(name, case, emulator)
