"""From a data path to rows: local files, directories and Hub data sets.

A row is a dictionary of columns and the place it came from. What the columns mean is the concern
of `shapes` and `named`.

Sets for several steps name their splits as UltraFeedback does: train_sft, train_prefs, train_gen,
and test_sft, test_prefs, test_gen.
"""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.system.errors import DataError
from pipeline.system.hub import require_reachable

CSV_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet", *CSV_SUFFIXES)

PAIR_OF_FILES = (Path("data/train.json"), Path("data/eval.json"))
"""Rows to train on, and to evaluate with: what `local/jsonfile` means, DeepSpeed-Chat's name."""

_SPLIT = re.compile(r"(?P<name>.+)@(?P<split>\w[\w.-]*)")
_WEIGHT = re.compile(r"(?P<name>.+):(?P<weight>\d+(?:\.\d*)?|\.\d+)")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+){0,2}")
"""A name on the Hub, perhaps with its owner and a configuration."""

_HUB_ALIASES = {
    "mkqa-Chinese": "apple/mkqa",
    "mkqa-Japanese": "apple/mkqa",
    "Cohere/miracl-ja": "Cohere/miracl-ja-queries-22-12",
    "Hello-SimpleAI/HC3-Chinese": "Hello-SimpleAI/HC3-Chinese/all",
}


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
    """The data path without its split and its weight."""

    weight: float | None
    """Its share of the mixture, relative to the other paths; None where none was given."""

    train: list[Row]

    eval: list[Row]
    """The rows of its test split; empty where it has none."""

    splits: str = ""
    """Which of several splits were read: `train_sft, for evaluation test_sft`."""


class Reader:
    """Reads data paths; every file and data set once, however many steps ask for it."""

    def __init__(self) -> None:
        self._files: dict[Path, list[Row]] = {}
        self._sets: dict[str, Mapping[str, Iterable[Any]]] = {}
        self._splits: dict[tuple[str, str], list[Row]] = {}

    def read(self, spec: str, *, step: int | None = None) -> Source:
        """The rows behind one data path, `NAME`, `NAME@SPLIT` or `NAME:WEIGHT`, for `step`.

        NAME is a file (`SUFFIXES`), a directory of such files, `local/jsonfile` (data/train.json
        and data/eval.json), or a Hub data set `owner/name` or `owner/name/config`.

        Raises:
            DataError: nothing is there, it can't be read, or which split to read is not clear.
        """
        bare, weight = split_weight(spec)
        name, wanted = split_name(bare)
        path = Path(name).expanduser()
        splits = ""
        if is_pair_of_files(name):
            train, test = map(self._read_file, PAIR_OF_FILES)
        elif path.is_dir():
            train, test, splits = self._read_directory(path, step=step, wanted=wanted)
        elif path.exists():
            if wanted is not None:
                raise DataError(f"data path {bare}: a file has no splits; leave out @{wanted}")
            train, test = self._read_file(path), []
        elif name.endswith(SUFFIXES) or not HUB_NAME.fullmatch(name) or name.startswith("."):
            raise DataError(f"data path {name}: there is no such file or directory")
        else:
            train, test, splits = self._read_hub(name, step=step, wanted=wanted)
        if not train:
            raise DataError(f"data path {bare} holds no rows")
        return Source(name, weight, train, test, splits)

    def _read_directory(
        self, directory: Path, *, step: int | None, wanted: str | None
    ) -> tuple[list[Row], list[Row], str]:
        files = sorted(
            file
            for file in directory.rglob("*")
            if file.name.endswith(SUFFIXES)
            and not any(part.startswith(".") for part in file.relative_to(directory).parts)
        )
        if not files:
            raise DataError(f"data path {directory} holds no {', '.join(SUFFIXES)} file")
        splits: dict[str, list[Path]] = {}
        for file in files:
            split = split_of_file(file.relative_to(directory).parts)
            name = split if wanted is not None else without_unknown_words(split)
            splits.setdefault(name, []).append(file)
        if wanted is None and not any(name.startswith("train") for name in splits):
            return self._rows_of_files(files), [], ""  # test files alone: they are asked for
        train, test = choose_splits(str(directory), splits, step=step, wanted=wanted)
        return (
            self._rows_of_files(splits[train]),
            [row for split in test for row in self._rows_of_files(splits[split])],
            _described(train, test, splits),
        )

    def _rows_of_files(self, files: Iterable[Path]) -> list[Row]:
        return [row for file in files for row in self._read_file(file)]

    def _read_file(self, path: Path) -> list[Row]:
        key = path.absolute()
        if key not in self._files:
            self._files[key] = _read_file(path)
        return self._files[key]

    def _read_hub(
        self, name: str, *, step: int | None, wanted: str | None
    ) -> tuple[list[Row], list[Row], str]:
        if name not in self._sets:
            self._sets[name] = _load_hub_set(name)
        splits = self._sets[name]
        train, test = choose_splits(name, splits, step=step, wanted=wanted)
        for split in (train, *test):
            if (name, split) not in self._splits:
                self._splits[name, split] = [
                    Row(row, f"{name} {split} row {number}")
                    for number, row in enumerate(splits[split], start=1)
                ]
        held_out = [row for split in test for row in self._splits[name, split]]
        return self._splits[name, train], held_out, _described(train, test, splits)


def _described(train: str, test: list[str], splits: Mapping[str, Any]) -> str:
    """Which splits are read, where there were others to choose from."""
    if {train, *test} == set(splits):
        return ""
    return f"{train}, for evaluation {', '.join(test)}" if test else train


def read_source(spec: str, *, step: int | None = None) -> Source:
    """What `Reader.read` gives for one data path."""
    return Reader().read(spec, step=step)


def is_pair_of_files(name: str) -> bool:
    """Whether a data path means `PAIR_OF_FILES`; what is there by that name itself wins."""
    return name == "local/jsonfile" and not Path(name).exists()


def split_name(name: str) -> tuple[str, str | None]:
    """`("owner/name", "train_sft")` for "owner/name@train_sft"; None where no split is named."""
    match = _SPLIT.fullmatch(name)
    if match is None or Path(name).expanduser().exists():
        return name, None
    return match["name"], match["split"]


def split_weight(spec: str) -> tuple[str, float | None]:
    """`("rows.jsonl", 0.5)` for "rows.jsonl:0.5"; only a number at the end is a weight."""
    match = _WEIGHT.fullmatch(spec)
    if match is None or Path(spec).expanduser().exists():
        return spec, None
    weight = float(match["weight"])
    if weight <= 0:
        raise DataError(f"data path {spec}: a weight must be above 0")
    return match["name"], weight


def _read_file(path: Path) -> list[Row]:
    """The rows of one file; raises DataError where the file is missing, broken or empty."""
    if not path.is_file():
        raise DataError(f"data path {path}: there is no such file")
    if path.name.endswith(".parquet"):
        rows = _read_parquet(path)
    elif path.name.endswith(CSV_SUFFIXES):
        rows = [Row(columns, origin) for origin, columns in read_csv(path, _text(path))]
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


def _text(path: Path) -> str:
    """The text of a file, unpacked where it is packed."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig")
    except gzip.BadGzipFile as error:
        raise DataError(
            f"{path} can't be read: {_one_line(error)}; name it without .gz, or compress it"
        ) from error
    except (EOFError, zlib.error) as error:
        raise DataError(
            f"{path} can't be read: {_one_line(error)}; compress it, or download it, again"
        ) from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {_one_line(error)}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {_one_line(error)}; save it as UTF-8"
        ) from error


def _read_json(path: Path) -> Iterator[Row]:
    """Rows of a JSON list or of JSON lines, whichever the file holds."""
    text = _text(path)
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


def _load_hub_set(name: str) -> Mapping[str, Iterable[Any]]:
    """The splits of a Hub data set, by name."""
    import datasets
    from datasets.config import HF_DATASETS_CACHE

    owner_name = _HUB_ALIASES.get(name, name).split("/")
    repository, config = "/".join(owner_name[:2]), "/".join(owner_name[2:]) or None
    cache = Path(HF_DATASETS_CACHE, repository.replace("/", "___"))
    if not cache.is_dir():
        sentence = f"data path {name} is neither a file or directory here nor in the Hub's cache"
        require_reachable(sentence, DataError, instead="a local file")
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
    return {str(split): rows for split, rows in splits.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


TRAIN_WORD = "train"
TEST_WORDS = ("test", "eval", "validation", "valid", "dev")

STEP_WORDS = {
    1: ("sft",),
    2: ("prefs", "pref", "preference", "preferences", "rm", "reward"),
    3: ("gen", "ppo", "rl", "prompts"),
}
"""What the name of a step's split says after `train_`."""


def is_test(name: str) -> bool:
    """Whether a file or split called `name` holds test rows: test, eval-00000-of-00002, dev_2."""
    return re.split(r"[-_.]", name.lower())[0] in TEST_WORDS


def split_of_file(parts: Sequence[str]) -> str:
    """The split that a file belongs to, by the parts of its path below the set's directory.

    `train_sft-00000-of-00003.parquet` is of train_sft, `test/a.jsonl` of test, any other of train.
    """
    for part in parts:
        words = re.split(r"[-_.]", part.lower().split(".")[0])
        if words[0] == TRAIN_WORD or words[0] in TEST_WORDS:
            kept = [word for word in words[1:] if word and not word.isdigit() and word != "of"]
            return "_".join([words[0], *kept])
    return TRAIN_WORD


def without_unknown_words(split: str) -> str:
    """`train` or `test`, and what names a step: train_sft, but train for train_b, test for dev."""
    word, _, rest = split.partition("_")
    word = "test" if word in TEST_WORDS else word
    return f"{word}_{rest}" if any(rest in words for words in STEP_WORDS.values()) else word


def choose_splits(
    name: str, splits: Collection[str], *, step: int | None, wanted: str | None = None
) -> tuple[str, list[str]]:
    """The training split that `step` reads, and the test splits that go with it, if any.

    That is `asked`, else `train`, else the only one whose name begins so, else the one that is
    named for the step.

    Raises:
        DataError: there is none, or there are several and none is named for the step.
    """
    if wanted is not None:
        if wanted not in splits:
            raise DataError(
                f"data path {name}@{wanted}: there is no split {wanted}; there are"
                f" {', '.join(sorted(splits))}"
            )
        return wanted, _test_splits(wanted, splits)
    train = [split for split in splits if split.startswith(TRAIN_WORD)]
    train = train or list(splits)[: len(splits) == 1]
    if TRAIN_WORD in train:
        return TRAIN_WORD, _test_splits(TRAIN_WORD, splits)
    if len(train) > 1:
        words = STEP_WORDS.get(step or 0, ())
        train = [split for split in train if split.removeprefix(TRAIN_WORD).strip("_-") in words]
    if len(train) != 1:
        raise DataError(_which_one(name, splits, step))
    return train[0], _test_splits(train[0], splits)


def _test_splits(train: str, splits: Collection[str]) -> list[str]:
    """The test split of the same name as `train`, else a plain one, else all where it is alone."""
    rest = train.removeprefix(TRAIN_WORD) if train.startswith(TRAIN_WORD) else ""
    for ending in dict.fromkeys((rest, "")):
        found = [word + ending for word in TEST_WORDS if word + ending in splits]
        if found and train not in found:
            return found[:1]
    others = [split for split in splits if split.startswith(TRAIN_WORD) and split != train]
    if others or is_test(train):
        return []
    return [split for split in splits if is_test(split)]


def _which_one(name: str, splits: Collection[str], step: int | None) -> str:
    train = sorted(split for split in splits if split.startswith(TRAIN_WORD))
    if train:
        of_step = f" and not one named for step {step}" if step else ""
        return (
            f"data path {name} has several training splits{of_step}: {', '.join(train)};"
            f" name the one to read, such as {name}@{train[0]}"
        )
    return (
        f"data path {name} has no train split, it has {', '.join(splits)}; name the one to read,"
        f" such as {name}@{next(iter(splits), 'train')}"
    )


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
