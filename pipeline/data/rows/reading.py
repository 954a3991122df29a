"""From data paths to examples: each path's rows read once, with a report of what was not used."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config import RowColumns
from pipeline.data.examples import Example
from pipeline.data.rows.columns import NO_ANSWER, Reading, names
from pipeline.data.rows.named import NamedSet, named_set
from pipeline.data.rows.shapes import check_fields, read_row, standing
from pipeline.data.rows.sources import Reader, Row, Source
from pipeline.system.errors import DataError


@dataclass(frozen=True)
class ReadPath:
    """The examples of one data path."""

    name: str
    """The path, with its place in the list where it is given twice."""

    weight: float | None
    train: list[Example]
    eval: list[Example]


@dataclass(frozen=True)
class _Converted:
    train: list[Example]
    eval: list[Example]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Wanted:
    """Which columns of the rows are read, beside those of the usual names."""

    fields: Mapping[str, str]
    """Our names of columns to the rows'."""

    kept: RowColumns = field(default_factory=RowColumns)
    """Columns that examples have as `extra` too."""

    def check(self, columns: Collection[str]) -> None:
        """Raise DataError for a name that none of the rows' columns has."""
        if self.fields:
            check_fields(self.fields, columns)
        for name in sorted(self.kept.needed):
            if name not in columns:
                raise DataError(
                    f"no row has the column {name}, which a reward reads; there are"
                    f" {names(columns)}: name another one as the reward's column"
                )

    @property
    def key(self) -> tuple[object, ...]:
        """What is the same for all that is read in the same way."""
        return tuple(sorted(self.fields.items())), self.kept


class RowReader:
    """Reads data paths; what several steps read in the same way is read once."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._converted: dict[tuple[object, ...], _Converted] = {}

    def read(
        self, paths: Sequence[str], wanted: Wanted, *, step: int, notes: list[str]
    ) -> list[ReadPath]:
        """The examples behind each path; `notes` receives what was left out, and why.

        Raises:
            DataError: a path, a row or a name in `wanted` can't be used.
        """
        sources = [self._reader.read(path, step=step) for path in paths]
        if wanted.fields or wanted.kept.needed:
            rows = (row for source in sources for row in (*source.train, *source.eval))
            wanted.check({name for row in rows for name in row.columns})
        read = []
        for number, source in enumerate(sources, start=1):
            converted = self._convert(source, wanted, step)
            again = any(source.name == other.name for other in sources[: number - 1])
            name = f"{source.name} (path {number})" if again else source.name
            if source.splits:
                notes.append(f"{name}: step {step} reads the split {source.splits}")
            notes += [f"{name}: {note}" for note in converted.notes]
            read.append(ReadPath(name, source.weight, converted.train, converted.eval))
        return read

    def _convert(self, source: Source, wanted: Wanted, step: int) -> _Converted:
        known = None if wanted.fields else named_set(source.name)
        if known is not None and step == 2 and not known.has_rejected:
            raise DataError(
                f"data path {source.name} has no rejected responses, which step 2 needs;"
                " use it in steps 1 and 3"
            )
        key = (source.name, source.splits, wanted.key)
        if key not in self._converted:
            self._converted[key] = _convert(source, wanted, known)
        return self._converted[key]


def _convert(source: Source, wanted: Wanted, known: NamedSet | None) -> _Converted:
    reading = Reading()

    def example(row: Row) -> Example | None:
        if known is None:
            return read_row(row, wanted.fields, reading, kept=wanted.kept)
        found = known.read(row)
        return found and replace(found, extra=wanted.kept.of(row.columns))

    def examples(rows: list[Row]) -> list[Example]:
        read = [example(row) for row in rows]
        if known is not None:
            reading.left_out[NO_ANSWER] += read.count(None)
        return [each for each in read if each is not None]

    train, held_out = examples(standing(source.train)), examples(standing(source.eval))
    notes = []
    if known is None:
        unused = reading.columns - reading.used
        rest = f"; not used: {names(unused)}" if unused else ""
        notes.append(f"uses the columns {names(reading.used)}{rest}")
    else:
        notes.append("is a known data set, read by its own schema")
    notes += [f"left out {_rows(n)} {why}" for why, n in reading.left_out.items() if n]
    notes += [
        f"{_rows(n)} {why}: no demonstrations, their prompts are for step 3"
        for why, n in reading.no_demonstrations.items()
    ]
    if not train:
        reasons = [why for why, n in reading.left_out.most_common() if n]
        raise DataError(
            f"data path {source.name}: none of its {_rows(len(source.train))} is usable:"
            f" rows {' and rows '.join(reasons)}"
        )
    return _Converted(train, held_out, tuple(notes))


def _rows(count: int) -> str:
    return f"{count} row{'s' if count != 1 else ''}"
