"""A gradient that is not finite on one rank skips the step on all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import LossScaleConfig, OptimConfig, TrainedModelConfig
from pipeline.engine.engine import Engine
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.test_stages import build, compute_loss


def make_engine(stage: int, dtype: str, **changes: Any) -> Engine:
    config = TrainedModelConfig(
        zero_stage=stage,
        optim=OptimConfig(lr=1e-2, schedule="linear", warmup_ratio=0.0),
        fp16=LossScaleConfig(initial_scale_power=4, hysteresis=1),
        **changes,
    )
    return Engine(build("llama", dtype), config, total_steps=10)


def get_state(engine: Engine) -> list[Tensor]:
    """Return the masters, moments and step counters of this process."""
    return [
        tensor.clone()
        for group in engine.groups
        for tensor in (group.masters.fp32(), *group.state.values())
    ]


def overflow_on_one_rank(stage: int, dtype: str) -> dict[str, Any]:
    engine = make_engine(stage, dtype)
    engine.backward(compute_loss(engine, 0, 0, rank()))
    first = engine.step()
    before = get_state(engine)

    for micro_batch in range(2):
        loss = compute_loss(engine, 1, micro_batch, rank())
        engine.backward(loss * float("inf") if rank() == 1 and micro_batch == 0 else loss)
    skipped = engine.step()

    unchanged = all(map(torch.equal, before, get_state(engine)))
    steps, scale = engine.steps, engine.scaler.scale
    engine.backward(compute_loss(engine, 2, 0, rank()))
    third = engine.step()
    return {
        "skipped": (first.skipped, skipped.skipped, third.skipped),
        "unchanged": unchanged,
        "steps": (steps, engine.steps),
        "scale": scale,
        "rates": (first.lr, third.lr),
    }


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp16")])
def test_overflow_on_one_rank_skips_the_step_on_all_ranks(stage: int, dtype: str) -> None:
    first, second = run_ranks(overflow_on_one_rank, stage, dtype)

    assert first == second
    assert first["skipped"] == (False, True, False)
    assert first["unchanged"]
    assert first["steps"] == (1, 2)  # the schedule has not moved for the skipped step
    assert first["scale"] == (8.0 if dtype == "fp16" else 1.0)
    assert first["rates"][0] > first["rates"][1] == pytest.approx(0.9 * 1e-2)
