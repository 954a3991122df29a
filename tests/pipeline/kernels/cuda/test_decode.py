"""Decode attention: the kernel's own source, run on the CPU, against float64."""

import pytest
import torch

from tests.pipeline.kernels.cuda.attention_cases import (
    GRID,
    QUICK,
    TOLERANCES,
    Case,
    inputs_of,
    relative_error,
    run,
)
from tests.pipeline.kernels.cuda.emulated import Emulator

CPU = torch.device("cpu")


def emulated(case: Case, emulator: Emulator) -> tuple[torch.Tensor, float]:
    inputs = inputs_of(case, CPU)
    with emulator.memory(*inputs.tensors(), schedule=case.schedule):
        out = run(case, inputs, emulator.gpu())
    return out, relative_error(inputs, out)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_kernel_computes_the_reference(case: Case, emulator: Emulator) -> None:
    _, error = emulated(case, emulator)

    assert error < TOLERANCES[case.dtype]


@pytest.mark.grid
@pytest.mark.parametrize("case", GRID, ids=str)
def test_the_kernel_computes_the_reference_everywhere(case: Case, emulator: Emulator) -> None:
    _, error = emulated(case, emulator)

    assert error < TOLERANCES[case.dtype]
