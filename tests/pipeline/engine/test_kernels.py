"""The engine computes the same bits with and without kernels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.model import OffloadConfig
from pipeline.engine.engine import Engine
from tests.pipeline.engine.test_stages import DTYPES, build, compute_loss, settings

STEPS = 3


def train(stage: int, kernels: str, dtype: str, **zero: Any) -> list[torch.Tensor]:
    """Return weights and moments after some steps."""
    model = build("llama", dtype)
    config = replace(settings(stage, max_norm=0.5, **zero), kernels=kernels)
    engine = Engine(model, config, total_steps=STEPS)
    for step in range(STEPS):
        for micro_batch in range(2):
            engine.backward(compute_loss(engine, step, micro_batch, 0))
        engine.step()
    state = [
        tensor.clone()
        for group in engine.iter_groups()
        for tensor in (*group.named_moments().values(), group.masters.fp32())
    ]
    with engine.gathered():
        return state + [param.detach().clone() for param in model.parameters()]


OFFLOADS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "deterministic": {"reduction": "deterministic"},
    "optimizer on a disk": {"offload": {"optimizer": "nvme"}},
    "weights on a disk": {"offload": {"params": "nvme"}},
    "weights offloaded": {"offload": {"params": "cpu", "optimizer": "cpu"}},
}


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("offload", OFFLOADS)
def test_kernels_change_no_bit(offload: str, dtype: str, tmp_path: Path) -> None:
    zero = dict(OFFLOADS[offload])
    if "offload" in zero:
        zero["offload"] = OffloadConfig(**zero["offload"], nvme_path=tmp_path)
    stages = (3,) if "offload" in zero else (0, 1)

    for stage in stages:
        expected = train(stage, "off", dtype, **zero)
        actual = train(stage, "required", dtype, **zero)
        assert all(map(torch.equal, actual, expected))
