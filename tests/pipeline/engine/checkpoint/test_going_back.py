"""What a run that goes back leaves of its checkpoints, and which ones it keeps for that."""

from pathlib import Path

import pytest

from pipeline.engine.checkpoint.find import newest
from pipeline.engine.checkpoint.going_back import NOTE, Return, forget_return
from pipeline.engine.checkpoint.healthy import healthy_up_to, needed_to_go_back
from pipeline.engine.checkpoint.layout import step_of, steps_in
from pipeline.errors import CheckpointError
from tests.pipeline.engine.checkpoint.saving import fragments, writer

HEALTHY = {"healthy": True}


def steps(root: Path) -> list[int]:
    return [step_of(path) or 0 for path in reversed(steps_in(root))]


def save(root: Path, healthy: dict[int, bool], *, margin: int | None) -> None:
    saver = writer(root, margin=margin)
    for step, is_healthy in healthy.items():
        saver.save(step, fragments(step), {"healthy": is_healthy})
    saver.wait()


@pytest.mark.parametrize(
    ("healthy", "margin", "left"),
    [
        ([True] * 9, None, [7, 8]),
        ([True] * 9, 1, [7, 8]),
        ([True] * 9, 3, [5, 6, 7, 8]),
        # The newest healthy one that lies 3 steps back is that of step 1; unhealthy ones go.
        ([True, True, False, False, False, False, True, False, False], 3, [1, 6, 7, 8]),
        # And it stays however many unhealthy ones follow.
        ([True] + [False] * 8, 2, [0, 7, 8]),
    ],
)
def test_what_a_run_may_go_back_to_outlives_the_ones_that_follow(
    healthy: list[bool], margin: int | None, left: list[int], tmp_path: Path
) -> None:
    save(tmp_path, dict(enumerate(healthy)), margin=margin)

    assert steps(tmp_path) == left


def test_only_what_called_itself_healthy_and_can_be_read_is_gone_back_to(tmp_path: Path) -> None:
    save(tmp_path, {0: True, 2: True, 4: False, 6: True, 8: True}, margin=100)
    (tmp_path / "step_00000006" / "manifest.json").write_text("{}")

    assert [step_of(path) for path in healthy_up_to(tmp_path, 7)] == [2, 0]
    assert [step_of(path) for path in needed_to_go_back(tmp_path, 8, margin=5)] == [8, 2]


def test_what_follows_is_gone_after_a_run_went_back_and_a_step_is_saved_anew(
    tmp_path: Path,
) -> None:
    saver = writer(tmp_path, margin=9)
    for step in range(4):
        saver.save(step, fragments(step), HEALTHY)
    note = Return(count=1, step=1, parts={"run": {"step": 1}})
    saver.go_back(note.step)
    note.write(tmp_path)

    note.discard_what_follows(tmp_path, by="return-1")

    assert steps(tmp_path) == [0, 1]
    assert Return.read(tmp_path) == note
    assert note.is_behind(HEALTHY)
    assert not note.is_behind({"returns": 1})
    saver.save(3, fragments(30), {"returns": 1, **HEALTHY})
    saver.wait()
    checkpoint, passed_over = newest(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.state["returns"], passed_over) == (3, 1, [])


def test_a_note_that_can_not_be_read_is_an_error_and_none_is_none(tmp_path: Path) -> None:
    assert Return.read(tmp_path) is None
    for text in ("{", "[]", '{"count": 1}'):
        (tmp_path / NOTE).write_text(text)
        with pytest.raises(CheckpointError, match=r"went_back\.json can't be read"):
            Return.read(tmp_path)
    forget_return(tmp_path)
    forget_return(tmp_path)
    assert Return.read(tmp_path) is None
