"""Learning-rate schedules, by hand."""

import pytest

from pipeline.config import OptimConfig
from pipeline.engine.lr import lr_factor


def factors(total_steps: int, **settings: object) -> list[float]:
    optim = OptimConfig(**settings)  # pyright: ignore[reportArgumentType]
    return [lr_factor(step, total_steps=total_steps, optim=optim) for step in range(total_steps)]


def test_linear_falls_in_equal_parts_from_the_first_step() -> None:
    assert factors(4, schedule="linear", warmup_ratio=0.0) == [1.0, 0.75, 0.5, 0.25]


def test_cosine_is_half_way_down_in_the_middle() -> None:
    first, quarter, half, last_quarter = factors(4, schedule="cosine", warmup_ratio=0.0)

    assert (first, half) == (1.0, pytest.approx(0.5))
    assert quarter == pytest.approx((1 + 2**-0.5) / 2)
    assert last_quarter == pytest.approx((1 - 2**-0.5) / 2)


def test_warm_up_rises_linearly_and_its_first_step_already_moves() -> None:
    rising = factors(10, schedule="constant", warmup_ratio=0.4)

    assert rising == [0.25, 0.5, 0.75, 1.0, *[1.0] * 6]


def test_warm_up_is_rounded_up_to_whole_steps() -> None:
    assert factors(10, schedule="constant", warmup_ratio=0.11)[:2] == [0.5, 1.0]


def test_the_schedule_ends_at_its_final_share() -> None:
    falling = factors(4, schedule="linear", warmup_ratio=0.0, final_lr_ratio=0.2)
    beyond = OptimConfig(schedule="cosine", warmup_ratio=0.0, final_lr_ratio=0.2)

    assert falling == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert lr_factor(4, total_steps=4, optim=beyond) == pytest.approx(0.2)
    assert lr_factor(9, total_steps=4, optim=beyond) == pytest.approx(0.2)


def test_a_single_step_uses_the_whole_rate() -> None:
    assert factors(1, schedule="cosine", warmup_ratio=0.03) == [1.0]
