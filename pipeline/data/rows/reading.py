"""From data paths to examples: reads each path's rows once and reports unused data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.config import RowColumns
from pipeline.data.examples import Example
from pipeline.data.rows.columns import NO_ANSWER, names
from pipeline.data.rows.named import named_set
from pipeline.data.rows.shapes import Reading, check_columns, read_row, standing
from pipeline.data.rows.sources import Row, Source, read_source
from pipeline.system.errors import DataError


@dataclass(frozen=True)
class ReadPath:
    """The examples of one data path."""

    name: str
    """The path, with its index in the list if it is given twice."""

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
) -> list[ReadPath]:
    """Read the examples of each path.

    Args:
        paths: data paths.
        fields: names of the rows' columns, by our names for them.
        kept: columns to keep in `extra`.
        step: number of the step that reads them.
        notes: receives notes on what was dropped, and why.
        optional: whether rows may have our names instead of those in `fields`.

    Raises:
        DataError: a path, a row or a column can't be used.
    """
    sources = [read_source(path, step=step) for path in paths]
    if fields or kept.needed:
        rows = [row.columns for source in sources for row in (*source.train, *source.eval)]
        notes += check_columns(rows, {} if optional else fields, kept)
    read: list[ReadPath] = []
    for count, source in enumerate(sources, start=1):
        again = any(source.name == other.name for other in sources[: count - 1])
        name = f"{source.name} (path {count})" if again else source.name
        if source.splits:
            notes.append(f"{name}: step {step} reads the split {source.splits}")
        train, held_out, remarks = _convert(source, fields, kept, step)
        notes += [f"{name}: {remark}" for remark in remarks]
        read.append(ReadPath(name, source.weight, train, held_out))
    return read


def _convert(
    source: Source, fields: Mapping[str, str], kept: RowColumns, step: int
) -> tuple[list[Example], list[Example], list[str]]:
    """Convert the rows of a source to training and test examples, and notes."""
    known = None if fields else named_set(source.name)
    if known is not None and step == 2 and not known.has_rejected:
        raise DataError(
            f"data path {source.name} has no rejected responses, which step 2 needs;"
            " use it in steps 1 and 3"
        )
    reading = Reading()

    def examples(rows: list[Row]) -> list[Example]:
        if known is None:
            read = [read_row(row, fields, reading, kept=kept) for row in rows]
        else:
            read = [known.read(row, kept=kept) for row in rows]
            reading.left_out[NO_ANSWER] += read.count(None)
        return [example for example in read if example is not None]

    train, held_out = examples(standing(source.train)), examples(standing(source.eval))
    notes = ["is a known data set with its own schema"]
    if known is None:
        unused = reading.columns - reading.used
        rest = f"; not used: {names(unused)}" if unused else ""
        notes = [f"uses the columns {names(reading.used)}{rest}"]
    left_out = {why: n for why, n in reading.left_out.most_common() if n}
    notes += [f"dropped {num_rows(n)} {why}" for why, n in left_out.items()]
    notes += [
        f"{num_rows(n)} {why}: not demonstrations; their prompts are for step 3"
        for why, n in reading.no_demonstrations.items()
    ]
    notes += [
        f"{remark}: {num_rows(len(rows))} ({rows[0]}{', ...' if len(rows) > 1 else ''})"
        for remark, rows in reading.remarks.items()
    ]
    if not train:
        raise DataError(
            f"data path {source.name}: none of its {num_rows(len(source.train))} is usable:"
            f" rows {' and rows '.join(left_out)}"
        )
    return train, held_out, notes


def num_rows(count: int) -> str:
    """A number of rows, for messages."""
    return f"{count} row{'s' if count != 1 else ''}"
