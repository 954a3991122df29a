"""The rows of RewardBench 2 (Malik et al. 2025, 2506.01937): a prompt, right and wrong responses.

Columns are those of allenai/reward-bench-2: `prompt`, `chosen` and `rejected` (lists of texts),
`subset`, and `id`, which in the subset Ties is `ref:N` or `tied:N`. Others are not read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.data.examples import Message
from pipeline.data.rows.columns import LeftOut, turns
from pipeline.data.rows.dialogues import Turns, with_history
from pipeline.data.rows.sources import Row, read_source
from pipeline.errors import DataError

TIES = "ties"
"""The subset that is scored in another way, in lower case."""

_TIES_ID = re.compile(r"(ref|tied):(\d+)")


@dataclass(frozen=True)
class BenchRow:
    """A prompt and its responses, the right ones first."""

    origin: str
    subset: str
    prompt: Turns
    responses: tuple[str, ...]

    num_correct: int
    """How many of the responses are right."""

    kind: str = ""
    """Of Ties: `ref`, a question with one right response, or `tied`, a like one with several."""

    number: int = 0
    """Of Ties: what a question with one right response and its like with several share."""

    @property
    def is_tie(self) -> bool:
        """Whether the row is of the subset Ties."""
        return self.subset.lower() == TIES


def read_bench(path: str, *, history: str = "all") -> list[BenchRow]:
    """All rows of a file, directory or Hub name, of its test split where there is one.

    Raises:
        DataError: there are none, a row lacks something, or Ties are not in pairs.
    """
    source = read_source(path, step=2)
    rows = [_read(row, history) for row in source.eval or source.train]
    _check_ties([row for row in rows if row.is_tie])
    return rows


def _read(row: Row, history: str) -> BenchRow:
    right, wrong = _texts(row, "chosen"), _texts(row, "rejected")
    subset = row.columns.get("subset")
    if not isinstance(subset, str) or not subset:
        raise DataError(f"{row.origin}: subset must name the part of the benchmark, got {subset!r}")
    found = BenchRow(
        row.origin, subset, with_history(_prompt(row), history), (*right, *wrong), len(right)
    )
    return _tie(found, row.columns) if found.is_tie else found


def _prompt(row: Row) -> Turns:
    """Text is one user turn as it stands, whatever it looks like; a list holds turns."""
    value = row.columns.get("prompt")
    if isinstance(value, str):
        return (Message("user", value),)
    try:
        found = turns(row, "prompt") if isinstance(value, list) else ()
    except LeftOut as reason:
        raise DataError(f"{row.origin}: prompt is a dialogue {reason}; remove the row") from None
    if not found or found[-1].role != "user":
        raise DataError(f"{row.origin}: prompt must be text, or turns of which a user has the last")
    return found


def _texts(row: Row, name: str) -> Sequence[str]:
    value = row.columns.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        what = "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
        raise DataError(f"{row.origin}: {name} must be a list of one or more texts, got {what}")
    return value


def _tie(row: BenchRow, columns: Mapping[str, object]) -> BenchRow:
    match = _TIES_ID.fullmatch(str(columns.get("id")))
    if match is None:
        raise DataError(
            f"{row.origin}: id of a row of {row.subset} must be ref:N or tied:N,"
            f" got {columns.get('id')!r}"
        )
    kind = match[1]
    if kind == "tied" and row.num_correct < 2:
        raise DataError(f"{row.origin}: a tied row needs two chosen responses or more")
    return BenchRow(
        row.origin, row.subset, row.prompt, row.responses, row.num_correct, kind, int(match[2])
    )


def _check_ties(rows: Sequence[BenchRow]) -> None:
    """Raise DataError unless each id is there once, and some questions are there in both kinds."""
    first: dict[tuple[str, int], BenchRow] = {}
    for row in rows:
        same = first.setdefault((row.kind, row.number), row)
        if same is not row:
            raise DataError(
                f"{row.origin}: id {row.kind}:{row.number} is also that of {same.origin};"
                " give each row an id of its own"
            )
    if rows and not any(("ref", number) in first for kind, number in first if kind == "tied"):
        raise DataError(
            f"{rows[0].origin}: {rows[0].subset} needs a ref:N and a tied:N of one N, as margins"
            " are compared between the two; this data has no such pair"
        )
