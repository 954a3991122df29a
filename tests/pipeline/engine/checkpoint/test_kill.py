"""Whenever a job is killed while it saves, what is offered afterwards is whole."""

from pathlib import Path

import pytest

from pipeline.engine.checkpoint.find import newest
from tests.pipeline.engine.checkpoint.saving import (
    POINTS,
    assert_holds,
    run_processes,
    save,
    save_steps,
    visible,
)


@pytest.mark.parametrize("point", POINTS)
def test_a_job_killed_at_any_point_of_a_save_loses_that_save_at_most(
    point: str, tmp_path: Path
) -> None:
    visit = 1 if point == "during_prune" else 3  # with two to keep, the third is the first to prune
    fault = f"checkpoint.{point}:*:{visit}:kill"

    codes = run_processes(save_steps, tmp_path, [1, 2, 3, 4], "killed", world_size=2, fault=fault)

    assert -9 in codes
    checkpoint, passed_over = newest(tmp_path)
    assert checkpoint is not None
    assert_holds(checkpoint, 3 if point == "during_prune" else 2)
    assert not passed_over

    save(tmp_path, 3, 4, job="next")  # which removes what the other left

    assert visible(tmp_path) == ["latest", "step_00000003", "step_00000004"]
    checkpoint, _ = newest(tmp_path)
    assert checkpoint is not None
    assert_holds(checkpoint, 4)


def test_a_rank_that_is_killed_alone_costs_the_others_one_save(tmp_path: Path) -> None:
    codes = run_processes(
        save_steps,
        tmp_path,
        [1, 2],
        "killed",
        world_size=3,
        fault="checkpoint.mid_file:1:2:kill",
    )

    assert codes[1] == -9
    checkpoint, _ = newest(tmp_path)
    assert checkpoint is not None
    assert_holds(checkpoint, 1)
