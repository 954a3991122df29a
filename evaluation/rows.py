"""Rows of a data path, of which a task takes those that no step trains on."""

from pipeline.data.rows.sources import Row, read_source
from pipeline.errors import DataError


def rows_of(path: str, limit: int | None, *, shots: int = 0) -> tuple[list[Row], list[Row]]:
    """Rows to ask, and rows to show as demonstrations.

    Asked are the rows of the test split, where the data path has one, and demonstrations are then
    the first training rows. Else the first `shots` rows are shown and the others asked.

    Raises:
        DataError: nothing is there, or no row is left to ask.
    """
    source = read_source(path)
    if source.eval:
        shown, queried = source.train[:shots], source.eval
    else:
        shown, queried = source.train[:shots], source.train[shots:]
    if not queried or len(shown) < shots:
        raise DataError(
            f"data path {path}: {len(source.train)} rows are too few for {shots} demonstrations"
            " and a question; lower --shots"
        )
    return queried[:limit], shown


def column(row: Row, name: str, kind: type | tuple[type, ...] = str) -> object:
    """What a row has in a column.

    Raises:
        DataError: there is no such column, or it holds something else.
    """
    value = row.columns.get(name)
    if value is None:
        raise DataError(
            f"{row.origin} lacks the column {name}; it has {', '.join(sorted(row.columns))}"
        )
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(each.__name__ for each in kinds)
        raise DataError(f"{row.origin}: {name} must be {wanted}, got {type(value).__name__}")
    return value
