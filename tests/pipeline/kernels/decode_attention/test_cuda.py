"""Decode attention on a GPU: where the result is written."""

import pytest
import torch

from pipeline.kernels.decode_attention import cuda
from tests.pipeline.kernels.decode_attention.cases import QUICK, inputs_of
from tests.pipeline.kernels.emulator.emulated import Emulator

CPU = torch.device("cpu")


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
