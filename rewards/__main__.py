"""Try reward sources on a file of rows, without a model: `python -m rewards`.

Each row's own response is scored: its demonstration or chosen response, otherwise its answer. A
source that compares responses with the answer should give every response a reward of 1.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.cli.options import parse_command, print_output, run_main
from pipeline.config import RowColumns, find_column
from pipeline.data.rows.shapes import check_columns, read_row
from pipeline.data.rows.sources import Row, read_source
from pipeline.system.errors import EXIT_FAILED, DataError, counted, require
from pipeline.system.installation import MODULE
from rewards.config import read_specs
from rewards.contract import Episode, SourceResults
from rewards.mixture import Rewards
from rewards.sampling import ScoringConfig
from rewards.sources import read_sources, row_columns

CHUNK = 256
"""Number of rows submitted at a time."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(ScoringConfig):
    """Sources and the rows to score."""

    reward: tuple[str, ...] = ()
    """Sources: file.py:function; a kind (math, exact, code, ...); a kind with its first setting
    (regex:PATTERN, length:256); or settings in braces, '{kind: math, column: solution}'."""

    data_path: str = ""
    """A .json, .jsonl, .csv, .tsv or .parquet file, a directory, or a Hub name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.reward), "--reward is missing: pass file.py:function, or a kind such as math"
        )
        require(bool(self.data_path), "--data-path is missing: pass a file of rows")


def main(argv: Sequence[str]) -> None:
    """Print a table of the sources; raise SystemExit(1) if one failed."""
    config = parse_command(
        VerifyConfig,
        argv,
        usage=f"{MODULE} rewards --reward SOURCE ... --data-path FILE [--SETTING VALUE ...]",
        about="Score the responses in a file of rows, without a model, and summarize the results.",
    )
    configs = read_specs(config.reward)
    columns = row_columns(read_sources(configs))  # checks the sources before reading rows
    answer_column = next(filter(None, (source.resolved_column for source in configs)), "")
    rows = read_source(config.data_path).train[: config.limit]
    check_columns([row.columns for row in rows], config.fields, columns)
    pairs = [(row, _read_response(row, config, answer_column, columns)) for row in rows]
    origins = [row.origin for row, episode in pairs if episode is not None]
    episodes = [episode for _, episode in pairs if episode is not None]
    if not episodes:
        raise DataError(
            "no row has a response to score; name the column of responses with"
            ' --fields \'{"response": "COLUMN"}\''
        )
    with Rewards(
        configs, timeout_seconds=config.timeout_seconds, workers=config.workers
    ) as rewards:
        for note in rewards.notes:
            print_output(note)
        start_time = time.monotonic()
        for first in range(0, len(episodes), CHUNK):
            rewards.submit(episodes[first : first + CHUNK])
        results = rewards.results()
        rate = len(episodes) / (time.monotonic() - start_time)
    num_skipped = len(rows) - len(episodes)
    skipped = f" ({counted(num_skipped, 'row')} without one)" if num_skipped else ""
    responses = f"{counted(len(episodes), 'response')}{skipped}, {rate:,.0f} per second"
    summary = f"{config.data_path}: {responses}"
    print_output("\n".join([summary, "", *_format_table(results), *_first_rows(origins, results)]))
    if any(result.num_failed for result in results.values()):
        raise SystemExit(EXIT_FAILED)


def _read_response(
    row: Row, config: VerifyConfig, answer_column: str, columns: RowColumns
) -> Episode | None:
    """Return the row's response as an episode, or None if the row has no response."""
    example = read_row(row, config.fields)
    if example is None:
        return None
    response = (
        example.chosen[-1].content if example.chosen else find_column(row.columns, answer_column)
    )
    if response is None:
        return None
    # Without a model there is no tokenizer: count words instead of tokens.
    num_tokens = len(str(response).split())
    extra = columns.select(row.columns)
    return Episode(example.prompt, str(response), extra=extra, num_tokens=num_tokens)


def _format_table(results: dict[str, SourceResults]) -> Iterator[str]:
    """Yield the table's lines: for each source, fractions of responses by reward, and the mean."""
    width = max(len("source"), *map(len, results))
    headings = ("= 1", "= 0", "None", "failed", "mean")
    yield "  ".join([f"{'source':{width}}", *(f"{heading:>7}" for heading in headings)])
    for name, result in results.items():
        values = [value for value in result.values if value is not None]
        count = len(result.values)
        ones, zeros = (sum(value == target for value in values) for target in (1, 0))
        missing = count - len(values) - result.num_failed
        fractions = [f"{n / count:7.1%}" for n in (ones, zeros, missing, result.num_failed)]
        mean = math.fsum(values) / len(values) if values else math.nan
        yield "  ".join([f"{name:{width}}", *fractions, f"{mean:7.3f}"])


def _first_rows(origins: Sequence[str], results: dict[str, SourceResults]) -> Iterator[str]:
    """Yield the first rows on which each source fails, does not apply, or returns less than 1."""
    for name, result in results.items():
        first_rows: dict[str, str] = {}
        for origin, value, failure in zip(origins, result.values, result.failures, strict=True):
            if failure is not None:
                first_rows.setdefault("failed", f"{origin}: {failure}")
            elif value is None:
                first_rows.setdefault("None", origin)
            elif value < 1:
                first_rows.setdefault("not 1", f"{origin}: {value:g}")
        yield from (f"{name}: first {kind}: {row}" for kind, row in first_rows.items())


if __name__ == "__main__":
    run_main(main)
