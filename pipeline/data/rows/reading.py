"""Convert data paths to examples: read each path's rows once and report unused data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.config import RowColumns
from pipeline.data.examples import Example
from pipeline.data.rows.columns import join_names
from pipeline.data.rows.named import named_set
from pipeline.data.rows.shapes import ReadStats, check_columns, drop_revoked, read_row
from pipeline.data.rows.sources import Row, Source, read_source
from pipeline.system.errors import DataError, counted


@dataclass(frozen=True)
class PathExamples:
    """The examples of one data path."""

    name: str
    """The path, with its position in the list if it is given more than once."""

    weight: float | None
    train: list[Example]
    eval: list[Example]


def read_paths(
    paths: Sequence[str],
    fields: Mapping[str, str],
    kept: RowColumns,
    *,
    step: int,
    notes: list[str],
    optional: bool = False,
) -> list[PathExamples]:
    """Read the examples of each path for a step; add to `notes` what was dropped, and why.

    `fields` maps our column names to those in the data; with `optional`, rows may use our names
    instead. Columns that `kept` selects are kept in `extra`.

    Raises:
        DataError: a path, a row or a column can't be used.
    """
    sources = [read_source(path, step=step) for path in paths]
    if fields or kept.needed:
        rows = [row.columns for source in sources for row in (*source.train, *source.eval)]
        notes += check_columns(rows, {} if optional else fields, kept)
    path_examples: list[PathExamples] = []
    for number, source in enumerate(sources, start=1):
        is_repeated = any(source.name == other.name for other in sources[: number - 1])
        name = f"{source.name} (path {number})" if is_repeated else source.name
        if source.splits:
            notes.append(f"{name}: step {step} reads the split {source.splits}")
        train, held_out, remarks = _convert(source, fields, kept, step)
        notes += [f"{name}: {remark}" for remark in remarks]
        path_examples.append(PathExamples(name, source.weight, train, held_out))
    return path_examples


def _convert(
    source: Source, fields: Mapping[str, str], kept: RowColumns, step: int
) -> tuple[list[Example], list[Example], list[str]]:
    """Convert a source's rows to training and held-out examples; also return notes for the log."""
    schema = None if fields else named_set(source.name)
    if schema is not None and step == 2 and not schema.has_rejected:
        raise DataError(
            f"data path {source.name} has no rejected responses, which step 2 needs;"
            " use it in steps 1 and 3"
        )
    stats = ReadStats()

    def convert(rows: list[Row]) -> list[Example]:
        if schema is None:
            examples = [read_row(row, fields, stats, kept=kept) for row in rows]
        else:
            examples = [schema.read(row, kept=kept) for row in rows]
            stats.skipped["without a prompt, a response or a preference"] += examples.count(None)
        return [example for example in examples if example is not None]

    train, held_out = convert(drop_revoked(source.train)), convert(drop_revoked(source.eval))
    notes = ["is a known data set with its own schema"]
    if schema is None:
        unused = stats.columns - stats.used
        rest = f"; not used: {join_names(unused)}" if unused else ""
        notes = [f"uses the columns {join_names(stats.used)}{rest}"]
    skipped = {reason: count for reason, count in stats.skipped.most_common() if count}
    notes += [f"dropped {counted(count, 'row')} {reason}" for reason, count in skipped.items()]
    notes += [
        f"{counted(count, 'row')} {reason}: not used as demonstrations; step 3 uses the prompts"
        for reason, count in stats.prompt_only.items()
    ]
    for remark, origins in stats.remarks.items():
        first = f"{origins[0]}{', ...' if len(origins) > 1 else ''}"
        notes.append(f"{remark}: {counted(len(origins), 'row')} ({first})")
    if not train:
        raise DataError(
            f"data path {source.name}: none of the {len(source.train)} rows read can be used;"
            f" skipped rows {' and rows '.join(skipped) or 'that later rows revoked'}"
        )
    return train, held_out, notes
