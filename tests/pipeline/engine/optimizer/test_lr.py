"""Learning-rate schedules, compared with hand-computed numbers and transformers.

The tables of DeepSpeed's schedules are computed by its formulas for a warm-up of 4 steps in a run
of 10; DeepSpeed 0.19.8 gives the same numbers.
"""

import pytest
import torch
from transformers import get_scheduler

from pipeline.config import OptimConfig


def optim(schedule: str, **settings: object) -> OptimConfig:
    return OptimConfig(schedule=schedule, **settings)


def factors(total_steps: int, schedule: str, **settings: object) -> list[float]:
    config = optim(schedule, **settings)
    return [config.lr_factor(step, total_steps=total_steps) for step in range(total_steps)]


@pytest.mark.parametrize("schedule", ["constant", "constant_with_warmup"])
def test_warmup_is_linear_and_its_first_step_is_not_zero(schedule: str) -> None:
    assert factors(10, schedule, warmup_ratio=0.4) == [0.25, 0.5, 0.75, 1.0, *[1.0] * 6]


def test_warmup_steps_override_the_warmup_ratio() -> None:
    assert factors(10, "constant", warmup_ratio=0.5, warmup_steps=2)[:3] == [0.5, 1.0, 1.0]
    assert factors(10, "constant", warmup_ratio=0.5, warmup_steps=0) == [1.0] * 10


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedule_ends_at_the_final_ratio(schedule: str) -> None:
    config = optim(schedule, warmup_ratio=0.0, final_lr_ratio=0.2)

    ratios = [config.lr_factor(step, total_steps=4) for step in (0, 4, 9)]

    assert ratios == pytest.approx([1.0, 0.2, 0.2])


@pytest.mark.parametrize(
    ("schedule", "settings", "reference"),
    [
        ("constant_with_warmup", {}, {}),
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_restarts", {}, {}),
        ("polynomial", {"final_lr_ratio": 0.1}, {"lr_end": 0.01}),
    ],
)
@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
def test_schedules_match_transformers_except_for_the_first_step(
    schedule: str, settings: dict[str, object], reference: dict[str, object], warmup_steps: int
) -> None:
    total_steps, peak = 23, 0.1
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    scheduler = get_scheduler(
        schedule,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=reference,
    )
    expected = []
    for _ in range(total_steps + 1):
        expected.append(scheduler.get_last_lr()[0] / peak)
        optimizer.step()
        scheduler.step()

    ratios = factors(total_steps, schedule, warmup_steps=warmup_steps, **settings)

    in_warmup = expected[1 : warmup_steps + 1]
    assert ratios == pytest.approx([*in_warmup, *expected[warmup_steps:total_steps]], abs=1e-12)
