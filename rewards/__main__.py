"""Try sources of rewards on a file of rows, without a model: `python -m rewards`.

Each row's own response is scored: its demonstration or better response, else its answer. A source
that compares with the answer should find all of them right.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.cli.command import joined, read_command
from pipeline.cli.options import run_main, say
from pipeline.data.examples import Example, Message
from pipeline.data.rows.reading import Wanted
from pipeline.data.rows.shapes import read_row
from pipeline.data.rows.sources import Row, read_source
from pipeline.system.errors import EXIT_FAILED, DataError, require
from pipeline.system.installation import MODULE
from rewards.config import check_limits, read_specs
from rewards.contract import Episode, Scored
from rewards.mixture import Rewards
from rewards.sources import read_sources, row_columns

CHUNK = 256
"""Rows submitted together."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """What to try."""

    reward: tuple[str, ...] = ()
    """Sources: file.py:function; a kind (math, exact, code, ...); a kind with what it needs
    (regex:PATTERN, length:256); or all settings, '{kind: math, column: solution}'."""

    data_path: str = ""
    """A .json, .jsonl, .csv, .tsv or .parquet file, a directory, or a Hub name."""

    fields: dict[str, str] = field(default_factory=dict)
    """Column names where they differ from the usual: prompt=question."""

    response: str | None = None
    """Column with the response to score; null takes the demonstration or better response of each
    row, else its answer."""

    limit: int | None = None
    """Rows to read, from the first."""

    timeout_seconds: float = 10.0
    """Seconds that one call of a source may take; a longer one has failed."""

    workers: int = 2
    """Processes in which programs compute rewards."""

    cache_dir: Path | None = None
    """Where replies of endpoints are kept."""

    def __post_init__(self) -> None:
        require(bool(self.reward), "--reward is missing: give file.py:function, or a kind as math")
        require(bool(self.data_path), "--data-path is missing: give a file of rows")
        check_limits(timeout_seconds=self.timeout_seconds, workers=self.workers)
        require(self.limit is None or self.limit > 0, f"--limit must be above 0, got {self.limit}")


@dataclass(frozen=True)
class _Responses:
    """Rows with a response, as episodes."""

    origins: list[str]
    better: list[Episode]
    """The rows' own responses."""

    worse: dict[int, Episode]
    """By place of the row, the worse response of a preference."""


def main(argv: Sequence[str]) -> None:
    """Print a table of the sources; exit with code 1 if one failed."""
    config = read_command(
        VerifyConfig,
        argv,
        usage=f"{MODULE} rewards --reward SOURCE ... --data-path FILE [--SETTING VALUE ...]",
        about="Score the responses that rows have, without a model, and print how the sources did.",
        gather=joined("reward"),
    )
    configs = read_specs(config.reward)
    kept = row_columns(read_sources(configs))  # which checks them before the rows are read
    column = next((each.reads_column for each in configs if each.reads_column is not None), None)
    rows = read_source(config.data_path).train[: config.limit]
    Wanted(config.fields, kept).check({name for row in rows for name in row.columns})
    responses = _read_responses(rows, config, column)
    with Rewards(
        configs,
        timeout_seconds=config.timeout_seconds,
        workers=config.workers,
        cache_dir=config.cache_dir,
    ) as rewards:
        for note in rewards.notes:
            say(note)
        began = time.monotonic()
        better = _score(rewards, responses.better)
        seconds = time.monotonic() - began
        worse = _score(rewards, [*responses.worse.values()])
    count, left_out = len(responses.better), len(rows) - len(responses.better)
    without = f", {left_out} left out without a response" if left_out else ""
    head = f"{config.data_path}: {count} responses{without}, {count / seconds:,.0f} a second"
    say("\n".join([head, "", *_table(better), *_notes(responses, better, worse)]))
    if any(scored.num_failed for scored in better.values()):
        raise SystemExit(EXIT_FAILED)


def _read_responses(rows: Sequence[Row], config: VerifyConfig, column: str | None) -> _Responses:
    responses = _Responses([], [], {})
    for row in rows:
        example = read_row(row, config.fields)
        text = None if example is None else _response(row, example, config.response, column)
        if example is None or text is None:
            continue
        place = len(responses.better)
        responses.origins.append(row.origin)
        responses.better.append(_episode(example.prompt, text, row, place))
        if example.rejected and config.response is None:
            rejected = example.rejected[-1].content
            responses.worse[place] = _episode(example.prompt, rejected, row, place)
    if not responses.better:
        raise DataError(
            "no row has a response to score; --response COLUMN names the column that holds it"
        )
    return responses


def _response(row: Row, example: Example, response: str | None, column: str | None) -> str | None:
    if response is not None:
        if response not in row.columns:
            raise DataError(f"{row.origin}: there is no column {response}, which --response names")
        return str(row.columns[response])
    if example.chosen:
        return example.chosen[-1].content
    answer = row.columns.get(column or "")
    return None if answer is None else str(answer)


def _episode(prompt: tuple[Message, ...], response: str, row: Row, slot: int) -> Episode:
    # Without a model there is no tokenizer: words stand for tokens.
    num_tokens = len(response.split())
    return Episode(prompt, response, extra=dict(row.columns), num_tokens=num_tokens, slot=slot)


def _score(rewards: Rewards, episodes: Sequence[Episode]) -> dict[str, Scored]:
    for start in range(0, len(episodes), CHUNK):
        rewards.submit(episodes[start : start + CHUNK])
    return rewards.results()


def _table(scored: dict[str, Scored]) -> Iterator[str]:
    """A line for each source: shares of responses by reward, and the mean reward."""
    width = max(len("source"), *map(len, scored))
    heads = ("= 1", "= 0", "None", "failed", "mean")
    yield "  ".join([f"{'source':{width}}", *(f"{head:>7}" for head in heads)])
    for name, each in scored.items():
        values = [value for value in each.values if value is not None]
        count = len(each.values)
        right, zero = sum(value >= 1 for value in values), sum(value == 0 for value in values)
        none = count - len(values) - each.num_failed
        shares = [f"{n / count:7.1%}" for n in (right, zero, none, each.num_failed)]
        mean = math.fsum(values) / len(values) if values else math.nan
        yield "  ".join([f"{name:{width}}", *shares, f"{mean:7.3f}"])


def _notes(
    responses: _Responses, better: dict[str, Scored], worse: dict[str, Scored]
) -> Iterator[str]:
    """How often the better response of a preference wins, and the first rows that stand out."""
    for name, scored in better.items():
        pairs = [
            (scored.values[place], value)
            for place, value in zip(responses.worse, worse[name].values, strict=True)
        ]
        points = [
            (more > less) + 0.5 * (more == less)
            for more, less in pairs
            if more is not None and less is not None
        ]
        if points:
            yield (
                f"{name}: the better response of {len(pairs)} preferences has the higher reward in"
                f" {sum(points) / len(points):.1%} (ties as a half)"
            )
        first: dict[str, str] = {}
        for origin, value, failure in zip(
            responses.origins, scored.values, scored.failed, strict=True
        ):
            if failure is not None:
                first.setdefault("failed", f"{origin}: {failure}")
            elif value is None:
                first.setdefault("None", origin)
            elif value < 1:
                first.setdefault("not 1", f"{origin}: {value:g}")
        for what, where in first.items():
            yield f"{name}: first {what}: {where}"


if __name__ == "__main__":
    run_main(main)
