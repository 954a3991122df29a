"""Decode attention: the kernel's own source, run on the CPU, against float64."""

import pytest
import torch

from pipeline.kernels.decode_attention import cuda
from pipeline.kernels.decode_attention.cases import (
    GRID,
    QUICK,
    Case,
    inputs_of,
    is_right,
    run,
)
from pipeline.kernels.emulator.emulated import Emulator

CPU = torch.device("cpu")


def is_right_emulated(case: Case, emulator: Emulator) -> bool:
    inputs = inputs_of(case, CPU)
    with emulator.memory(*inputs.tensors(), schedule=case.schedule):
        out = run(case, inputs, emulator.gpu())
    return is_right(case, inputs, out)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_kernel_computes_the_reference(case: Case, emulator: Emulator) -> None:
    assert is_right_emulated(case, emulator)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_the_result_is_written_where_it_is_wanted(num_splits: int, emulator: Emulator) -> None:
    inputs = inputs_of(QUICK[0], CPU)
    place = torch.full((5, *inputs.query.shape[1:]), torch.nan, dtype=inputs.query.dtype)
    outs: list[torch.Tensor] = []
    for out in (None, place[:3]):
        with emulator.memory(*inputs.tensors(), out):
            outs.append(
                cuda.decode_attention(
                    inputs.query,
                    inputs.key,
                    inputs.value,
                    inputs.scores,
                    gpu=emulator.gpu(),
                    longest=130,
                    num_splits=num_splits,
                    out=out,
                )
            )

    assert outs[1].data_ptr() == place.data_ptr()
    assert torch.equal(outs[0], place[:3])
    assert place[3:].isnan().all()


@pytest.mark.grid
@pytest.mark.parametrize("case", GRID, ids=str)
def test_the_kernel_computes_the_reference_everywhere(case: Case, emulator: Emulator) -> None:
    assert is_right_emulated(case, emulator)
