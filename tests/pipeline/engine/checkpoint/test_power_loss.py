"""A machine that loses power while it saves comes back with a whole checkpoint."""

from pathlib import Path

import pytest

from pipeline.engine.checkpoint.find import newest
from tests.pipeline.engine.checkpoint.power import lose_power, record
from tests.pipeline.engine.checkpoint.saving import (
    POINTS,
    assert_holds,
    run_processes,
    save,
    save_steps,
)


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
    assert checkpoint is not None
    assert_holds(checkpoint, 3 if point == "during_prune" else 2)
    save(root, 4, job="next")


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_saved_survives_a_loss_of_power(world_size: int, tmp_path: Path) -> None:
    root, journal = tmp_path / "root", tmp_path / "journal"

    codes = run_processes(save_recorded, root, journal, [1, 2, 3], True, world_size=world_size)
    lose_power(root, journal)

    assert codes == [0] * world_size
    checkpoint, _ = newest(root)
    assert checkpoint is not None
    assert_holds(checkpoint, 3)
    assert (root / "latest").read_text() == "step_00000003\n"


def test_without_syncing_nothing_would_survive(tmp_path: Path) -> None:
    root, journal = tmp_path / "root", tmp_path / "journal"

    run_processes(save_recorded, root, journal, [1, 2, 3], False, world_size=1)
    lose_power(root, journal)

    assert newest(root) == (None, [])
