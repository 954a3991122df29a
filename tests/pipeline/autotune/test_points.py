from pathlib import Path
from typing import Any

from pipeline.autotune.points import Point, add_point, best_of, read_points


def point(**changes: Any) -> Point:
    settings = {"step": "step1_sft", "key": "a", "settings": {"micro_batch_size": 4}}
    measured = {"outcome": "measured", "tokens_per_second": (90.0, 100.0, 500.0)}
    return Point(**{**settings, **measured, **changes})


def test_speed_is_the_median_of_the_steps() -> None:
    assert point().speed == 100.0
    assert point(tokens_per_second=(95.0, 105.0)).spread == 50**0.5 / 100
    assert point(tokens_per_second=(95.0,)).spread == 0.0


def test_the_best_is_the_fastest_that_was_measured() -> None:
    failed = point(outcome="out of memory", tokens_per_second=())
    slow, fast = point(tokens_per_second=(1.0,)), point(tokens_per_second=(2.0,))

    assert best_of([failed, slow, fast, slow]) == fast
    assert best_of([failed]) is None


def test_points_come_back_from_their_file_by_step_and_key(tmp_path: Path) -> None:
    file = tmp_path / "autotune" / "trials.jsonl"
    points = [point(), point(outcome="killed", tokens_per_second=(), message="Killed")]
    for each in (points[0], point(key="b"), point(step="step3_ppo"), points[1]):
        add_point(file, each)

    assert read_points(file, step="step1_sft", key="a") == points
    assert read_points(tmp_path / "none", step="step1_sft", key="a") == []


def test_a_line_that_was_cut_off_costs_nothing_but_itself(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    add_point(file, point())
    add_point(file, point(memory_gb=1.5))
    file.write_bytes(file.read_bytes()[:-20])

    add_point(file, point(memory_gb=2.5))

    read = read_points(file, step="step1_sft", key="a")
    assert [each.memory_gb for each in read] == [None, 2.5]
