"""Rows of CSV and TSV files: the first line names the columns, an empty cell is a missing value."""

import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import DataError

CSV_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")


def read_csv(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(origin, columns) of each row of `text`, the content of `path`.

    Cells are separated by commas (in a .tsv by tabs; by semicolons where the first line has no
    comma), and may be quoted as RFC 4180 has it, line breaks included.

    Raises:
        DataError: a row has more or fewer cells than the first line, or a quote is never closed.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=_delimiter(path, text), strict=True
    )
    header: list[str] | None = None
    line = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{path} line {line} is not valid CSV ({error}); mend it") from error
        if cells is None:
            return
        origin, line = f"{path} line {line}", reader.line_num + 1
        if not cells:
            continue
        if header is None:
            header = _header(origin, cells)
        elif len(cells) != len(header):
            raise DataError(
                f"{origin} has {len(cells)} cells, and the first line names {len(header)} columns;"
                " put text with separators or line breaks into double quotes"
            )
        else:
            columns = zip(header, cells, strict=True)
            yield origin, {name: cell if cell.strip() else None for name, cell in columns}


def _delimiter(path: Path, text: str) -> str:
    if ".tsv" in path.suffixes:
        return "\t"
    first = text.lstrip().partition("\n")[0]
    return ";" if ";" in first and "," not in first else ","


def _header(origin: str, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    repeated = [name for name, count in Counter(names).items() if count > 1 or not name]
    if repeated:
        raise DataError(
            f"{origin} names the columns: each needs a name of its own, and"
            f" {repeated[0] or 'an empty one'!r} is not"
        )
    return names
