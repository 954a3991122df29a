"""A job that is killed, or loses power, during a save loses only that save."""

from pathlib import Path

import pytest

from tests.pipeline.engine.checkpoint.power import lose_power, record
from tests.pipeline.engine.checkpoint.saving import (
    POINTS,
    assert_has_step,
    list_names,
    newest,
    run_processes,
    save,
    save_steps,
)


@pytest.mark.parametrize("point", POINTS)
def test_job_killed_during_a_save_loses_at_most_that_save(point: str, tmp_path: Path) -> None:
    nth = 1 if point == "during_prune" else 3  # the third save is the first that prunes
    fault = f"checkpoint.{point}:*:{nth}:kill"

    codes = run_processes(save_steps, tmp_path, [1, 2, 3, 4], "killed", world_size=2, fault=fault)

    assert -9 in codes
    checkpoint, skipped = newest(tmp_path)
    assert_has_step(checkpoint, 3 if point == "during_prune" else 2)
    assert not skipped

    save(tmp_path, 3, 4, job="next")

    assert list_names(tmp_path) == ["latest", "step_00000003", "step_00000004"]
    checkpoint, _ = newest(tmp_path)
    assert_has_step(checkpoint, 4)


def test_rank_killed_during_a_save_costs_only_that_save(tmp_path: Path) -> None:
    codes = run_processes(
        save_steps, tmp_path, [1, 2], "killed", world_size=3, fault="checkpoint.mid_file:1:2:kill"
    )

    assert codes[1] == -9
    checkpoint, _ = newest(tmp_path)
    assert_has_step(checkpoint, 1)


def save_recorded(
    rank: int, world_size: int, root: Path, journal: Path, steps: list[int], syncs: bool
) -> None:
    record(journal, syncs=syncs)
    save_steps(rank, world_size, root, steps, "recorded")


@pytest.mark.parametrize("point", POINTS)
def test_power_lost_during_a_save_costs_at_most_that_save(point: str, tmp_path: Path) -> None:
    root, journal = tmp_path / "root", tmp_path / "journal"
    nth = 1 if point == "during_prune" else 3
    fault = f"checkpoint.{point}:*:{nth}:kill"

    codes = run_processes(save_recorded, root, journal, [1, 2, 3], True, world_size=1, fault=fault)
    lose_power(root, journal)

    assert -9 in codes
    checkpoint, _ = newest(root)
    assert_has_step(checkpoint, 3 if point == "during_prune" else 2)


def test_completed_save_survives_a_loss_of_power(tmp_path: Path) -> None:
    root, journal = tmp_path / "root", tmp_path / "journal"

    codes = run_processes(save_recorded, root, journal, [1, 2, 3], True, world_size=2)
    lose_power(root, journal)

    assert codes == [0, 0]
    checkpoint, _ = newest(root)
    assert_has_step(checkpoint, 3)
    assert (root / "latest").read_text() == "step_00000003\n"


def test_nothing_survives_a_loss_of_power_without_syncing(tmp_path: Path) -> None:
    root, journal = tmp_path / "root", tmp_path / "journal"

    run_processes(save_recorded, root, journal, [1, 2, 3], False, world_size=1)
    lose_power(root, journal)

    assert newest(root) == (None, [])
