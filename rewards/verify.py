"""Sources of rewards run on the responses that rows have, without any model."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.data.examples import Example, Message
from pipeline.data.rows.shapes import read_row
from pipeline.data.rows.sources import Row
from pipeline.errors import DataError
from rewards.contract import Episode, Scored
from rewards.mixture import Rewards

CHUNK = 256
"""Rows submitted together."""


@dataclass(frozen=True)
class Rows:
    """Rows with a response, as episodes."""

    episodes: list[Episode]
    """The rows' own responses as episodes, whose slots number them from 0."""

    origins: list[str]

    rejected: dict[int, Episode]
    """By slot, the worse response of a preference."""

    left_out: int
    """Rows without a response."""


@dataclass(frozen=True)
class Summary:
    """What one source gave for the responses of all rows."""

    rows: int
    applies: int
    failed: int
    right: int
    """Responses with a reward of 1 or more."""

    zero: int
    mean: float
    """Over those that it applies to."""

    preferred: float | None
    """Share of the preferences in which the better response has the higher reward, ties as a half;
    None where there are none."""

    examples: dict[str, str]
    """A sentence or origin by what it is an example of: failed, wrong, None."""


def read_rows(
    rows: Sequence[Row], *, fields: Mapping[str, str], response: str | None, column: str | None
) -> Rows:
    """The prompt and response of each row.

    Args:
        rows: as they were read.
        fields: our names of columns to the rows'.
        response: the column with the response; None takes the demonstration or better response of
            the row, else its answer.
        column: the column with the answer.

    Raises:
        DataError: a row can't be read, or none has a response.
    """
    found = Rows([], [], {}, 0)
    left_out = 0
    for row in rows:
        example = read_row(row, fields)
        text = None if example is None else _response(row, example, response, column)
        if example is None or text is None:
            left_out += 1
            continue
        slot = len(found.episodes)
        found.episodes.append(_episode(example.prompt, text, row, slot))
        found.origins.append(row.origin)
        if example.rejected and response is None:
            worse = example.rejected[-1].content
            found.rejected[slot] = _episode(example.prompt, worse, row, slot)
    if not found.episodes:
        raise DataError(
            "no row has a response to score; --response COLUMN names the column that holds it"
        )
    return Rows(found.episodes, found.origins, found.rejected, left_out)


def verify(rewards: Rewards, rows: Rows) -> tuple[dict[str, Summary], float]:
    """What each source gave for the responses, and the seconds that all took together."""
    began = time.monotonic()
    better = _scored(rewards, rows.episodes)
    seconds = time.monotonic() - began
    worse = _scored(rewards, list(rows.rejected.values())) if rows.rejected else {}
    summaries = {
        name: _summary(scored, rows, _preferred(scored, worse.get(name), list(rows.rejected)))
        for name, scored in better.items()
    }
    return summaries, seconds


def _scored(rewards: Rewards, episodes: Sequence[Episode]) -> dict[str, Scored]:
    for start in range(0, len(episodes), CHUNK):
        rewards.submit(episodes[start : start + CHUNK])
    return rewards.results()


def _episode(prompt: tuple[Message, ...], response: str, row: Row, slot: int) -> Episode:
    # Without a model there is no tokenizer: words stand for tokens.
    return Episode(
        prompt, response, extra=dict(row.columns), num_tokens=len(response.split()), slot=slot
    )


def _response(row: Row, example: Example, response: str | None, column: str | None) -> str | None:
    if response is not None:
        if response not in row.columns:
            raise DataError(f"{row.origin}: there is no column {response}, which --response names")
        return str(row.columns[response])
    if example.chosen:
        return example.chosen[-1].content
    answer = row.columns.get(column or "")
    return None if answer is None else str(answer)


def _preferred(better: Scored, worse: Scored | None, slots: Sequence[int]) -> float | None:
    if worse is None:
        return None
    pairs = [(better.values[slot], value) for slot, value in zip(slots, worse.values, strict=True)]
    points = [
        (more > less) + 0.5 * (more == less)
        for more, less in pairs
        if more is not None and less is not None
    ]
    return sum(points) / len(points) if points else None


def _summary(scored: Scored, rows: Rows, preferred: float | None) -> Summary:
    values = [value for value in scored.values if value is not None]
    examples: dict[str, str] = {}
    for origin, value, sentence in zip(rows.origins, scored.values, scored.failed, strict=True):
        if sentence is not None:
            examples.setdefault("failed", f"{origin}: {sentence}")
        elif value is None:
            examples.setdefault("None", origin)
        elif value < 1:
            examples.setdefault("not 1", f"{origin}: {value:g}")
    return Summary(
        rows=len(scored.values),
        applies=len(values),
        failed=scored.num_failed,
        right=sum(value >= 1 for value in values),
        zero=sum(value == 0 for value in values),
        mean=math.fsum(values) / len(values) if values else math.nan,
        preferred=preferred,
        examples=examples,
    )
