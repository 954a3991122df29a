"""From a data path to rows: local files, directories and Hub data sets.

A row is a dictionary of columns and the place it came from. What the columns mean is the concern
of `shapes` and `named`.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import DataError

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet")

_WEIGHT = re.compile(r"(?P<name>.+):(?P<weight>\d+(?:\.\d*)?|\.\d+)")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+){0,2}")
_HUB_ALIASES = {
    "mkqa-Chinese": "apple/mkqa",
    "mkqa-Japanese": "apple/mkqa",
    "Cohere/miracl-ja": "Cohere/miracl-ja-queries-22-12",
    "Hello-SimpleAI/HC3-Chinese": "Hello-SimpleAI/HC3-Chinese/all",
}
_TEST_WORDS = ("test", "eval", "validation", "valid", "dev")


@dataclass(frozen=True)
class Row:
    """One row as it was read."""

    columns: Mapping[str, Any]

    origin: str
    """`rows.jsonl line 17`"""


@dataclass(frozen=True)
class Source:
    """The rows of one data path."""

    name: str
    """The data path without its weight."""

    weight: float | None
    """Its share of the mixture, relative to the other paths; None where none was given."""

    train: list[Row]

    eval: list[Row]
    """The rows of its test split; empty where it has none."""


def read_source(spec: str) -> Source:
    """The rows behind one data path, `NAME` or `NAME:WEIGHT`.

    NAME is a .json, .jsonl, .jsonl.gz or .parquet file, a directory of such files, `local/jsonfile`
    (data/train.json and data/eval.json), or a Hub data set `owner/name` or `owner/name/config`.

    Raises:
        DataError: nothing is there, or it can't be read.
    """
    name, weight = split_weight(spec)
    path = Path(name).expanduser()
    if name == "local/jsonfile" and not path.exists():
        train, test = _read_file(Path("data/train.json")), _read_file(Path("data/eval.json"))
    elif path.is_dir():
        train, test = _read_directory(path)
    elif path.exists():
        train, test = _read_file(path), []
    elif name.endswith(SUFFIXES) or not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise DataError(f"data path {name}: there is no such file or directory")
    else:
        train, test = _read_hub(name)
    if not train:
        raise DataError(f"data path {name} holds no rows")
    return Source(name, weight, train, test)


def split_weight(spec: str) -> tuple[str, float | None]:
    """`("rows.jsonl", 0.5)` for "rows.jsonl:0.5"; only a number at the end is a weight."""
    match = _WEIGHT.fullmatch(spec)
    if match is None or Path(spec).exists():
        return spec, None
    weight = float(match["weight"])
    if weight <= 0:
        raise DataError(f"data path {spec}: a weight must be above 0")
    return match["name"], weight


def _is_test(name: str) -> bool:
    """Whether a file or split called `name` holds test rows: test, eval-00000-of-00002, dev_2."""
    return re.split(r"[-_.]", name.lower())[0] in _TEST_WORDS


def _read_directory(directory: Path) -> tuple[list[Row], list[Row]]:
    files = sorted(
        file
        for file in directory.rglob("*")
        if file.name.endswith(SUFFIXES)
        and not any(part.startswith(".") for part in file.relative_to(directory).parts)
    )
    if not files:
        raise DataError(f"data path {directory} holds no {', '.join(SUFFIXES)} file")
    test_files = [file for file in files if any(map(_is_test, file.relative_to(directory).parts))]
    if len(test_files) == len(files):  # a directory of nothing but test files is asked for as rows
        test_files = []
    train = [row for file in files if file not in test_files for row in _read_file(file)]
    return train, [row for file in test_files for row in _read_file(file)]


def _read_file(path: Path) -> list[Row]:
    """The rows of one file; raises DataError where the file is missing, broken or empty."""
    if not path.is_file():
        raise DataError(f"data path {path}: there is no such file")
    if path.name.endswith(".parquet"):
        rows = _read_parquet(path)
    elif path.name.endswith(SUFFIXES):
        rows = list(_read_json(path))
    else:
        raise DataError(
            f"data path {path}: {path.suffix or 'a file without suffix'} can't be read;"
            f" give one of {', '.join(SUFFIXES)}"
        )
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        columns = parquet.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {_one_line(error)}") from error
    return [Row(row, f"{path} row {number}") for number, row in enumerate(columns, start=1)]


def _read_json(path: Path) -> Iterator[Row]:
    """Rows of a JSON list or of JSON lines, whichever the file holds."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be read: {_one_line(error)}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {_one_line(error)}") from error
    if text.lstrip()[:1] == "[":
        items: Iterable[tuple[str, Any]] = _json_list(path, text)
    else:
        items = _json_lines(path, text)
    for origin, item in items:
        if not isinstance(item, dict):
            raise DataError(
                f"{origin}: a row is an object with named fields, got {type(item).__name__}"
            )
        yield Row(item, origin)


def _json_list(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path} line {error.lineno} is not valid JSON ({error.msg}); mend the file"
        ) from error
    return ((f"{path} row {number}", item) for number, item in enumerate(items, start=1))


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path} line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path} line {number} is not valid JSON ({error.msg} at column {error.colno});"
                " mend or remove the line"
            ) from error


def _read_hub(name: str) -> tuple[list[Row], list[Row]]:
    import datasets

    owner_name = _HUB_ALIASES.get(name, name).split("/")
    repository, config = "/".join(owner_name[:2]), "/".join(owner_name[2:]) or None
    try:
        splits = datasets.load_dataset(repository, config)
    # The loader runs readers of many kinds, and each fails in its own way.
    except Exception as error:
        raise DataError(
            f"data path {name} is neither a file or directory here nor a data set that the Hub"
            f" gives ({_one_line(error)}); check the name and the connection, or give a local file"
        ) from error
    if not isinstance(splits, datasets.DatasetDict):
        raise DataError(f"data path {name} has no named splits")
    return hub_rows(name, {str(split): rows for split, rows in splits.items()})


def hub_rows(name: str, splits: Mapping[str, Iterable[Any]]) -> tuple[list[Row], list[Row]]:
    """Train and test rows: the splits of those names, else the ones that begin so (train_sft)."""
    train = [split for split in splits if split == "train"]
    train = train or [split for split in splits if split.startswith("train")]
    train = train or list(splits)[: len(splits) == 1]
    if not train:
        raise DataError(
            f"data path {name} has no train split, it has {', '.join(splits)};"
            " save the rows you want as a local .parquet or .jsonl file and give that"
        )
    test = [split for word in _TEST_WORDS for split in splits if split == word][:1]
    test = test or [split for split in splits if _is_test(split) and split not in train]

    def rows(chosen: list[str]) -> list[Row]:
        return [
            Row(row, f"{name} {split} row {number}")
            for split in chosen
            for number, row in enumerate(splits[split], start=1)
        ]

    return rows(train), rows(test)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
