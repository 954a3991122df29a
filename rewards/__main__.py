"""Try sources of rewards on a file of rows, without a model: `python -m rewards`.

Each row's own response is scored: its demonstration or better response, else its answer. A source
that compares with the answer should find all of them right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.cli import run_main, say
from pipeline.command import joined, read_command
from pipeline.data.rows.reading import Wanted
from pipeline.data.rows.sources import read_source
from pipeline.errors import EXIT_FAILED, require
from pipeline.installation import MODULE
from rewards.config import RewardConfig, check_limits, read_spec
from rewards.mixture import Rewards
from rewards.sources import read_sources, row_columns
from rewards.verify import Rows, Summary, read_rows, verify


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """What to try."""

    reward: tuple[str, ...] = ()
    """Sources: file.py:function; a kind (math, exact, code, ...); a kind with what it needs
    (regex:PATTERN, length:256, json_schema:FILE); or all settings,
    '{kind: math, column: solution}'."""

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
    """Where answers of endpoints are kept."""

    def __post_init__(self) -> None:
        require(bool(self.reward), "--reward is missing: give file.py:function, or a kind as math")
        require(bool(self.data_path), "--data-path is missing: give a file of rows")
        check_limits(timeout_seconds=self.timeout_seconds, workers=self.workers)
        require(self.limit is None or self.limit > 0, f"--limit must be above 0, got {self.limit}")


def main(argv: Sequence[str]) -> None:
    """Print a table of the sources; exit with code 1 where one failed."""
    config = read_command(
        VerifyConfig,
        argv,
        usage=f"{MODULE} rewards --reward SOURCE ... --data-path FILE [--SETTING VALUE ...]",
        about="Score the responses that rows have, without a model, and print how the sources did.",
        gather=joined("reward"),
    )
    sources: list[RewardConfig] = []
    for spec in config.reward:
        sources.append(read_spec(spec, [source.name for source in sources]))
    kept = row_columns(read_sources(sources))  # which checks them before the rows are read
    columns = [each.reads_column for each in sources if each.reads_column is not None]
    read = read_source(config.data_path).train[: config.limit]
    Wanted(config.fields, kept).check({name for row in read for name in row.columns})
    rows = read_rows(
        read,
        fields=config.fields,
        response=config.response,
        column=columns[0] if columns else None,
    )
    with Rewards(
        sources,
        timeout_seconds=config.timeout_seconds,
        workers=config.workers,
        cache_dir=config.cache_dir,
    ) as rewards:
        for note in rewards.notes:
            say(note)
        summaries, seconds = verify(rewards, rows)
    say("\n".join(table(config.data_path, rows, summaries, seconds)))
    if any(summary.failed for summary in summaries.values()):
        raise SystemExit(EXIT_FAILED)


def table(path: str, rows: Rows, summaries: dict[str, Summary], seconds: float) -> list[str]:
    """The lines that say how the sources did."""
    count = len(rows.episodes)
    without = f", {rows.left_out} left out without a response" if rows.left_out else ""
    lines = [f"{path}: {count} responses{without}, {count / max(seconds, 1e-9):,.0f} a second", ""]
    width = max(len("source"), *(len(name) for name in summaries))
    heads = ("= 1", "= 0", "None", "failed", "mean")
    lines.append("  ".join([f"{'source':{width}}", *(f"{head:>7}" for head in heads)]))
    for name, each in summaries.items():
        none = each.rows - each.applies - each.failed
        shares = [f"{n / each.rows:7.1%}" for n in (each.right, each.zero, none, each.failed)]
        lines.append("  ".join([f"{name:{width}}", *shares, f"{each.mean:7.3f}"]))
    for name, each in summaries.items():
        if each.preferred is not None:
            lines.append(
                f"{name}: the better response of {len(rows.rejected)} preferences has the higher"
                f" reward in {each.preferred:.1%} (ties as a half)"
            )
        lines += [f"{name}: first {what}: {where}" for what, where in each.examples.items()]
    return lines


if __name__ == "__main__":
    run_main(main)
