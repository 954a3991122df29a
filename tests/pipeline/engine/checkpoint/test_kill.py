"""A job that is killed, or a machine that loses power, during a save loses only that save."""

from pathlib import Path

import pytest

from tests.pipeline.engine.checkpoint.power import lose_power, record
from tests.pipeline.engine.checkpoint.saving import (
    POINTS,
    assert_holds,
    newest,
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
    assert_holds(checkpoint, 3 if point == "during_prune" else 2)
    assert not passed_over

    save(tmp_path, 3, 4, job="next")

    assert visible(tmp_path) == ["latest", "step_00000003", "step_00000004"]
    checkpoint, _ = newest(tmp_path)
    assert_holds(checkpoint, 4)


def test_a_rank_that_is_killed_alone_costs_the_others_one_save(tmp_path: Path) -> None:
    codes = run_processes(
        save_steps, tmp_path, [1, 2], "killed", world_size=3, fault="checkpoint.mid_file:1:2:kill"
    )

    assert codes[1] == -9
    checkpoint, _ = newest(tmp_path)
    assert_holds(checkpoint, 1)


def save_recorded(
    rank: int, world_size: int, root: Path, journal: Path, steps: list[int], syncs: bool
) -> None:
    record(journal, syncs=syncs)
    save_steps(rank, world_size, root, steps, "recorded")


@pytest.mark.parametrize("point", POINTS)
def test_power_lost_at_any_point_of_a_save_costs_that_save_at_most(
    point: str, tmp_path: Path
) -> None:
    root, journal = tmp_path / "root", tmp_path / "journal"
    visit = 1 if point == "during_prune" else 3
    fault = f"checkpoint.{point}:*:{visit}:kill"

    codes = run_processes(save_recorded, root, journal, [1, 2, 3], True, world_size=1, fault=fault)
    lose_power(root, journal)

    assert -9 in codes
    checkpoint, _ = newest(root)
    assert_holds(checkpoint, 3 if point == "during_prune" else 2)


def test_a_completed_save_survives_a_loss_of_power(tmp_path: Path) -> None:
    root, journal = tmp_path / "root", tmp_path / "journal"

    codes = run_processes(save_recorded, root, journal, [1, 2, 3], True, world_size=2)
    lose_power(root, journal)

    assert codes == [0, 0]
    checkpoint, _ = newest(root)
    assert_holds(checkpoint, 3)
    assert (root / "latest").read_text() == "step_00000003\n"


def test_without_syncing_nothing_would_survive(tmp_path: Path) -> None:
    root, journal = tmp_path / "root", tmp_path / "journal"

    run_processes(save_recorded, root, journal, [1, 2, 3], False, world_size=1)
    lose_power(root, journal)

    assert newest(root) == (None, [])
