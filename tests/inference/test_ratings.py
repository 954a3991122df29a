"""The ratings file and its exports."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inference.ratings import (
    RatingsFile,
    active_ratings,
    export,
    main,
    read_ratings,
)
from pipeline.config import RowColumns
from pipeline.data.examples import Message
from pipeline.data.rows.reading import read_paths
from pipeline.system.errors import ConfigError, DataError

ROOT = Path(__file__).parent.parent.parent
QUESTION = {"role": "user", "content": "Q"}


def pair(choice: int | None, **changes: Any) -> dict[str, Any]:
    """Return a comparison of the responses `short` and `a longer one`."""
    return {
        "kind": "pair",
        "rater": "anna",
        "messages": [QUESTION],
        "answers": [{"model": "m", "text": "short"}, {"model": "m", "text": "a longer one"}],
        "choice": choice,
        "tie": False,
        **changes,
    }


def add_ratings(path: Path, *ratings: dict[str, Any]) -> list[str]:
    file = RatingsFile(path)
    return [file.add(rating) for rating in ratings]


def test_undone_rating_stays_in_the_file_but_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ratings.jsonl"
    first, second = add_ratings(path, pair(0), pair(1))

    RatingsFile(path).undo(first, "anna")

    lines = read_ratings(path)
    assert [line["kind"] for line in lines] == ["pair", "pair", "undo"]
    assert [line["id"] for line in active_ratings(lines)] == [second]
    with pytest.raises(KeyError):
        RatingsFile(path).undo("no such id", "anna")
    RatingsFile(path).undo(second, "anna")
    with pytest.raises(DataError, match="skipped rows that later rows revoked"):
        read_paths([str(path)], {}, RowColumns(), step=2, notes=[])


def test_acknowledged_ratings_survive_a_kill_at_any_instant(tmp_path: Path) -> None:
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
            acknowledged = [process.stdout.readline().strip() for _ in range(20)]
            os.kill(process.pid, signal.SIGKILL)
        path.write_bytes(path.read_bytes() + b'{"id": "')  # as if killed while writing a line
        RatingsFile(path)  # truncates the incomplete line
        assert set(acknowledged) <= {rating["id"] for rating in read_ratings(path)}


def test_steps_read_the_ratings_file_directly(tmp_path: Path) -> None:
    path = tmp_path / "ratings.jsonl"
    undone, *_ = add_ratings(
        path,
        pair(1),
        pair(0, strength=2),
        pair(None, tie=True),
        pair(None),
        {**pair(None), "kind": "edit", "answers": pair(0)["answers"][:1], "edit": " better "},
        {**pair(1), "kind": "thumb", "answers": pair(0)["answers"][:1]},
        {**pair(0), "kind": "thumb", "answers": pair(0)["answers"][:1]},
    )
    RatingsFile(path).undo(undone, "anna")
    notes: list[str] = []

    (data,) = read_paths([str(path)], {}, RowColumns(), step=2, notes=notes)

    prompt = (Message("user", "Q"),)
    rows = [(row.prompt, row.chosen, row.rejected, row.margin) for row in data.train]
    short, longer, better = (Message("assistant", t) for t in ("short", "a longer one", "better"))
    assert rows == [
        (prompt, (short,), (longer,), 2.0),
        (prompt, (better,), (), None),
        (prompt, (short,), (), None),
        (prompt, (), (short,), None),
    ]
    assert any("dropped 2 rows that prefer neither response" in note for note in notes)


def test_export_contains_the_majority_choice() -> None:
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


def test_commands_write_rows_that_steps_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, out = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "out.jsonl"))
    add_ratings(first, pair(0, shown=[0, 1], blind=True), pair(None))
    first.write_bytes(b"\xef\xbb\xbf" + first.read_bytes())  # a byte order mark, as on Windows
    add_ratings(second, pair(1, rater="ben", messages=[{"role": "user", "content": "R"}]))

    main(["export", str(first), str(second), str(first), "--out", str(out)])

    text = capsys.readouterr().out
    assert "out.jsonl: 2 rows from 3 ratings, 3 pairs" in text
    # Ratings of the same millisecond are unordered.
    chosen = [json.loads(line)["chosen"] for line in out.read_text().splitlines()]
    assert sorted(chosen) == ["a longer one", "short"]
    (data,) = read_paths([str(out)], {}, RowColumns(), step=2, notes=[])
    assert len(data.train) == 2
    with pytest.raises(ConfigError, match="is also an input"):
        main(["export", str(first), "--out", str(first)])
