"""The file of ratings, its exports, and agreement of raters."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inference.ratings import RatingsFile, agreement, export, main, read_ratings, standing_ratings
from pipeline.config import RowColumns
from pipeline.data.examples import Message
from pipeline.data.rows.reading import read_paths

ROOT = Path(__file__).parent.parent.parent
QUESTION = {"role": "user", "content": "Q"}


def pair(choice: int | None, **changes: Any) -> dict[str, Any]:
    """A comparison of the responses `short` and `a longer one`."""
    return {
        "kind": "pair",
        "rater": "anna",
        "messages": [QUESTION],
        "answers": [{"model": "m", "text": "short"}, {"model": "m", "text": "a longer one"}],
        "choice": choice,
        "tie": False,
        **changes,
    }


def written(path: Path, *ratings: dict[str, Any]) -> list[str]:
    file = RatingsFile(path)
    return [file.add(rating) for rating in ratings]


def test_what_was_taken_back_stays_in_the_file_and_stands_no_more(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ratings.jsonl"
    first, second = written(path, pair(0), pair(1))

    RatingsFile(path).undo(first, "anna")

    lines = read_ratings(path)
    assert [each["kind"] for each in lines] == ["pair", "pair", "undo"]
    assert [each["id"] for each in standing_ratings(lines)] == [second]
    with pytest.raises(KeyError):
        RatingsFile(path).undo("no such id", "anna")


def test_killed_at_any_instant_every_rating_that_counted_is_there(tmp_path: Path) -> None:
    path = tmp_path / "ratings.jsonl"
    program = f"""
from pathlib import Path
from inference.ratings import RatingsFile
file = RatingsFile(Path({str(path)!r}))
while True:
    print(file.add({pair(0)!r}), flush=True)
"""
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            counted = [process.stdout.readline().strip() for _ in range(20)]
            os.kill(process.pid, signal.SIGKILL)
        path.write_bytes(path.read_bytes() + b'{"id": "')  # as if killed within a line
        RatingsFile(path)  # which cuts what was not whole
        assert set(counted) <= {each["id"] for each in read_ratings(path)}


def test_steps_read_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ratings.jsonl"
    gone, *_ = written(
        path,
        pair(1),
        pair(0, strength=2),
        pair(None, tie=True),
        pair(None),
        {**pair(None), "kind": "edit", "answers": pair(0)["answers"][:1], "edit": " better "},
        {**pair(1), "kind": "thumb", "answers": pair(0)["answers"][:1]},
        {**pair(0), "kind": "thumb", "answers": pair(0)["answers"][:1]},
    )
    RatingsFile(path).undo(gone, "anna")
    notes: list[str] = []

    (read,) = read_paths([str(path)], {}, RowColumns(), step=2, notes=notes)

    prompt = (Message("user", "Q"),)
    found = [(each.prompt, each.chosen, each.rejected, each.margin) for each in read.train]
    short, longer, better = (Message("assistant", t) for t in ("short", "a longer one", "better"))
    assert found == [
        (prompt, (short,), (longer,), 2.0),
        (prompt, (better,), (), None),
        (prompt, (short,), (), None),
        (prompt, (), (short,), None),
    ]
    assert any("dropped 2 rows that prefer neither response" in note for note in notes)


def test_agreement_is_that_of_a_table_computed_by_hand() -> None:
    left_first, right_first = {"shown": [0, 1], "blind": True}, {"shown": [1, 0], "blind": True}
    other = {"messages": [{"role": "user", "content": "R"}]}
    ratings = [
        pair(0, id="1", **left_first),
        pair(0, id="2", **right_first),  # anna again, alike
        pair(0, id="3", rater="ben"),
        pair(1, id="4", rater="ben", **other, **left_first),
        pair(0, id="5", rater="anna", **other, shown=[0, 1]),  # by name, not blind
    ]

    found = agreement(ratings)

    assert (found.ratings, found.pairs, found.blind) == (5, 5, 3)
    assert found.left == pytest.approx(1 / 3)  # the first alone took what stood left
    assert found.longer == pytest.approx(1 / 5)
    assert found.self_agreement == 1.0
    # anna and ben: short-short twice, and of the other prompt longer against short. Observed 2/3;
    # of six labels five are "second" by their letters: expected 25/36 + 1/36.
    assert found.kappa == pytest.approx((2 / 3 - 26 / 36) / (1 - 26 / 36))
    assert agreement([]).kappa is None


def test_the_majority_of_raters_is_exported() -> None:
    ratings = [
        pair(0, id="1", strength=1),
        pair(0, id="2", strength=2, rater="ben"),
        pair(1, id="3", strength=3, rater="eva"),
        pair(1, id="4", messages=[QUESTION, {"role": "assistant", "content": "A"}, QUESTION]),
        pair(0, id="5", messages=[{"role": "user", "content": "split"}]),
        pair(1, id="6", messages=[{"role": "user", "content": "split"}]),
        {**pair(None), "id": "7", "kind": "edit", "edit": "better"},
    ]

    pairs, undecided = export(ratings)

    assert undecided == 1
    assert pairs[0] == {
        "prompt": [QUESTION],
        "chosen": "short",
        "rejected": "a longer one",
        "margin": 1.5,
    }
    assert pairs[-1] == {"prompt": [QUESTION], "chosen": "better"}


def test_the_commands_write_what_steps_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, out = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "out.jsonl"))
    written(one, pair(0, shown=[0, 1], blind=True), pair(None))
    written(other, pair(1, rater="ben", messages=[{"role": "user", "content": "R"}]))

    main(["export", str(one), str(other), str(one), "--out", str(out)])

    text = capsys.readouterr().out
    assert "out.jsonl: 2 rows" in text
    assert re.search("left +1\n", text)
    assert re.search("pairs +3\n", text)
    # Ratings of one millisecond have no order.
    chosen = [json.loads(line)["chosen"] for line in out.read_text().splitlines()]
    assert sorted(chosen) == ["a longer one", "short"]
    (read,) = read_paths([str(out)], {}, RowColumns(), step=2, notes=[])
    assert len(read.train) == 2
