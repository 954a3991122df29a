"""Offloaded gradients are copied to main memory during the backward pass."""

import pytest
import torch

from pipeline.engine.buffers import GradientCopies
from pipeline.engine.gradients import OffloadedSum


@pytest.mark.gpu
def test_the_host_continues_while_gradients_leave_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    total = OffloadedSum(lambda: torch.empty(2**22, pin_memory=True), GradientCopies(device))
    gradients = [torch.full((2**22,), float(value), device=device) for value in (1, 2, 3)]

    torch.cuda._sleep(500_000_000)
    for gradient in gradients:
        total.add(gradient)
    assert total.read is not None
    assert not total.read.query()
    torch.cuda.current_stream().wait_event(total.read)
    for gradient in gradients:
        gradient.zero_()

    assert torch.equal(total.finish(), torch.full((2**22,), 6.0))
