"""A gradient that is not finite anywhere skips the step everywhere, and is named in the end."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import LossScaleConfig, OptimConfig, TrainedModelConfig
from pipeline.engine.engine import Engine
from pipeline.engine.optimizer.gradients import LossScaler
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.test_stages import build, compute_loss


def make_engine(stage: int, dtype: str, **changes: Any) -> Engine:
    config = TrainedModelConfig(
        zero_stage=stage,  # pyright: ignore[reportArgumentType]
        optim=OptimConfig(lr=1e-2, schedule="linear", warmup_ratio=0.0),
        fp16=LossScaleConfig(initial_scale_power=4, hysteresis=1),
        **changes,
    )
    return Engine(build("llama", dtype), config, total_steps=10)


def state(engine: Engine) -> list[Tensor]:
    """Masters, moments and step counters of this process."""
    return [
        tensor.clone()
        for group in engine.groups
        for tensor in (group.masters.fp32(), *group.state.values())
    ]


def overflow_on_one_rank(stage: int, dtype: str) -> dict[str, Any]:
    engine = make_engine(stage, dtype)
    engine.backward(compute_loss(engine, 0, 0, rank()))
    first = engine.step()
    before = state(engine)

    for micro_batch in range(2):
        loss = compute_loss(engine, 1, micro_batch, rank())
        engine.backward(loss * float("inf") if rank() == 1 and micro_batch == 0 else loss)
    skipped = engine.step()

    unchanged = all(map(torch.equal, before, state(engine)))
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
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage: int, dtype: str) -> None:
    first, second = run_ranks(overflow_on_one_rank, stage, dtype)

    assert first == second
    assert first["skipped"] == (False, True, False)
    assert first["unchanged"]
    assert first["steps"] == (1, 2)  # the schedule has not moved for the skipped step
    assert first["scale"] == (8.0 if dtype == "fp16" else 1.0)
    assert first["rates"][0] > first["rates"][1] == pytest.approx(0.9 * 1e-2)


def test_the_loss_scale_halves_doubles_and_is_restored() -> None:
    settings = LossScaleConfig(
        initial_scale_power=3, hysteresis=2, loss_scale_window=2, min_loss_scale=4
    )
    scaler, other = (LossScaler(enabled=True, config=settings) for _ in range(2))

    def scales(finite: list[bool]) -> list[float]:
        found: list[float] = []
        for each in finite:
            scaler.update(finite=each)
            found.append(scaler.scale)
        return found

    # The second of two overflows halves; every two good steps after the first pair double.
    assert scales([False, True, True, True, True, True]) == [8.0, 8.0, 8.0, 16.0, 16.0, 32.0]
    assert scales([False, False, False]) == [32.0, 16.0, 8.0]
    scaler.update(finite=True)
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() == {**other.state_dict(), "good_steps": 1}
    assert scales([False, False]) == [4.0, 4.0]
    assert scaler.exhausted
    scaler.update(finite=True)
    assert not scaler.exhausted
    other.load_state_dict({**scaler.state_dict(), "enabled": False})
    assert (other.scale, other.good_steps, other.tokens) == (8.0, 0, 2)
    static = LossScaler(enabled=True, config=LossScaleConfig(loss_scale=64.0))
    static.update(finite=False)
    static.load_state_dict(scaler.state_dict())
    assert static.scale == 64.0
