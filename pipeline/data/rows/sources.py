"""Read rows from a data path: a local file, a directory or a Hub data set.

A row is a dictionary of columns and its origin. `shapes` and `named` interpret the columns.

Data sets for several steps name their splits as UltraFeedback does: train_sft, train_prefs,
train_gen, and test_sft, test_prefs, test_gen.
"""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pipeline.files.safetensors_header import reject_lfs_pointer
from pipeline.system.errors import DataError, one_line
from pipeline.system.hub import require_reachable

CSV_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet", *CSV_SUFFIXES)

METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Metadata files of `datasets` and LLaMA-Factory, which contain no rows."""

LOCAL_JSONFILE = (Path("data/train.json"), Path("data/eval.json"))
"""Files with the training and evaluation rows of `local/jsonfile`, DeepSpeed-Chat's name."""

_SPLIT = re.compile(r"(?P<name>.+)@(?P<split>\w[\w.-]*)")
_SPACE = re.compile(r"[\s\ufeff]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_WEIGHT = re.compile(r"(?P<name>.+):(?P<weight>\d+(?:\.\d*)?|\.\d+)")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+){0,2}")
"""A name on the Hub, optionally with its owner and a configuration."""

TRAIN = "train"
TEST_WORDS = ("test", "eval", "validation", "valid", "val", "dev")

STEP_WORDS = {
    1: ("sft",),
    2: ("prefs", "pref", "preference", "preferences", "rm", "reward"),
    3: ("gen", "ppo", "rl", "prompts"),
}
"""Suffixes of each step's splits, as in train_sft."""

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
    """Origin of the row, for error messages: `rows.jsonl line 17`."""

    unused: set[str] = field(default_factory=set, compare=False)
    """Keys inside columns that are not read, such as `messages[].id`."""

    remarks: set[str] = field(default_factory=set, compare=False)
    """Changes that a reader made to the row, for the log."""


@dataclass(frozen=True)
class Source:
    """The rows of one data path."""

    name: str
    """The data path without its split and its weight."""

    weight: float | None
    """Share of the mixture, relative to the other paths; None if not given."""

    train: list[Row]

    eval: list[Row]
    """The rows of the test split; empty if there is none."""

    splits: str = ""
    """The splits that are read, if there are others: `train_sft, and test_sft for evaluation`."""


def read_source(spec: str, *, step: int | None = None) -> Source:
    """Read the rows of one data path, `NAME`, `NAME@SPLIT` or `NAME:WEIGHT`, for `step`.

    NAME is a file (`SUFFIXES`), a directory of such files, `local/jsonfile` (data/train.json and
    data/eval.json), or a Hub data set `owner/name` or `owner/name/config`.

    Raises:
        DataError: the data doesn't exist or can't be read, or the split is ambiguous.
    """
    name_and_split, weight = split_weight(spec)
    name, requested = split_name(name_and_split)
    path = Path(name).expanduser()
    if is_local_jsonfile(name):
        splits = {TRAIN: _read_files(LOCAL_JSONFILE[:1]), "test": _read_files(LOCAL_JSONFILE[1:])}
    elif path.is_dir():
        splits = _find_directory_splits(path, requested)
    elif path.exists():
        splits = {TRAIN: _read_files([path])}
    elif not is_hub_name(name):
        raise DataError(f"data path {name}: no such file or directory")
    else:
        splits = _load_hub_splits(name)
    train, test = choose_splits(name, splits, step=step, requested=requested)
    description = f"{train}, and {', '.join(test)} for evaluation" if test else train
    return Source(
        name,
        weight,
        train=list(splits[train]),
        eval=[row for split in test for row in splits[split]],
        splits="" if {train, *test} == set(splits) else description,
    )


def _find_directory_splits(directory: Path, requested: str | None) -> dict[str, Iterator[Row]]:
    """Return the rows of a directory's files by split, read lazily.

    `train_sft-00000-of-00003.parquet` belongs to train_sft, `test/a.jsonl` to test, any other file
    to train. Suffixes that name no step are ignored, as in train_b, unless a split is `requested`.
    """
    splits: dict[str, list[Path]] = {}
    for file in sorted(directory.rglob("*")):
        parts = file.relative_to(directory).parts
        is_ignored = file.name in METADATA or any(part.startswith(".") for part in parts)
        if is_ignored or not file.name.endswith(SUFFIXES) or file.is_dir():
            continue
        split = TRAIN
        for part in reversed(parts):  # the outermost directory wins
            word, *rest = re.split(r"[-_.]", part.lower().split(".")[0])
            suffix = "_".join(w for w in rest if w and not w.isdigit() and w != "of")
            if word != TRAIN and word not in TEST_WORDS:
                continue
            if suffix and (requested or any(suffix in names for names in STEP_WORDS.values())):
                split = f"{word}_{suffix}"
            else:
                split = word if requested or word == TRAIN else "test"
        splits.setdefault(split, []).append(file)
    if not splits:
        has_arrow_files = any(directory.rglob("*.arrow"))
        fix = "; save it with to_parquet, not save_to_disk" if has_arrow_files else ""
        raise DataError(f"data path {directory} contains no {', '.join(SUFFIXES)} files{fix}")
    if requested is None and not any(split.startswith(TRAIN) for split in splits):
        splits = {TRAIN: [file for files in splits.values() for file in files]}
    return {split: _read_files(files) for split, files in splits.items()}


def _read_files(paths: Sequence[Path]) -> Iterator[Row]:
    for path in paths:
        yield from _read_file(path)


def is_hub_name(name: str) -> bool:
    """Return whether a data path, without its split and weight, is a name on the Hub."""
    is_path = Path(name).exists() or name.startswith(".") or name.endswith(SUFFIXES)
    return not (is_path or is_local_jsonfile(name)) and HUB_NAME.fullmatch(name) is not None


def bare_name(spec: str) -> str:
    """Return a data path without its split and weight."""
    return split_name(split_weight(spec)[0])[0]


def is_local_jsonfile(name: str) -> bool:
    """Return whether a data path is `local/jsonfile` and no file or directory has that name."""
    return name == "local/jsonfile" and not Path(name).exists()


def split_name(name: str) -> tuple[str, str | None]:
    """Parse "owner/name@train" as `("owner/name", "train")`, with None if no split is named."""
    match = _SPLIT.fullmatch(name)
    if match is None or Path(name).expanduser().exists():
        return name, None
    return match["name"], match["split"]


def split_weight(spec: str) -> tuple[str, float | None]:
    """Parse "rows.jsonl:0.5" as `("rows.jsonl", 0.5)`; only a trailing number is a weight."""
    match = _WEIGHT.fullmatch(spec)
    if match is None or Path(spec).expanduser().exists():
        return spec, None
    weight = float(match["weight"])
    if weight <= 0:
        raise DataError(f"data path {spec}: the weight must be positive")
    return match["name"], weight


def _read_file(path: Path) -> list[Row]:
    """Read the rows of one file; raise DataError if it is missing, broken or empty."""
    if not path.is_file():
        raise DataError(f"data path {path}: no such file")
    reject_lfs_pointer(path, DataError)
    if path.name.endswith(".parquet"):
        rows = [item for row in _read_parquet(path) for item in split_answers(row)]
    elif path.name.endswith(CSV_SUFFIXES):
        rows = list(_read_csv(path))
    elif path.name.endswith(SUFFIXES):
        rows = [item for row in _read_json(path) for item in split_answers(row)]
    else:
        raise DataError(
            f"data path {path}: the file name must end with one of {', '.join(SUFFIXES)}"
        )
    if not rows:
        raise DataError(f"{path} has no rows; add some, or remove the path")
    return rows


_ANSWER_COLUMNS = ("answers", "token_ids", "stop", "top_token_ids", "top_logprobs")


def split_answers(row: Row) -> list[Row]:
    """Split a row of `inference.generate --top-logprobs` into a demonstration for each answer.

    Numbers are stored in arrays, which need less memory than lists. Other rows are unchanged.
    """
    if any(row.columns.get(name) is None for name in ("prompt", *_ANSWER_COLUMNS)):
        return [row]
    import numpy as np

    from pipeline.data.teacher import TeacherTokens

    # The teacher saw none of these columns.
    columns = {k: v for k, v in row.columns.items() if k not in ("system", "label", "kto_tag")}
    if isinstance(row.columns["prompt"], str):
        columns.pop("tools", None)
        columns["prompt"] = [{"role": "user", "content": row.columns["prompt"]}]
    rows: list[Row] = []
    try:
        answers = zip(*(columns.pop(name) for name in _ANSWER_COLUMNS), strict=True)
        for text, ids, stop, top_ids, logprobs in answers:
            arrays = np.array(ids, np.int32), np.array(top_ids, np.int32)
            teacher = TeacherTokens(*arrays, np.array(logprobs, np.float32), stop == "eos")
            response = [{"role": "assistant", "content": text}]
            added = {"response": response, "top_logprobs": teacher}
            rows.append(Row({**columns, **added}, row.origin))
    except (TypeError, ValueError, OverflowError):
        raise DataError(
            f"{row.origin}: {', '.join(_ANSWER_COLUMNS)} must be lists with one item per answer, as"
            " written by `inference.generate --top-logprobs`; the top tokens of a position must be"
            " distinct, and their probabilities must sum to at most 1"
        ) from None
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        records = parquet.read_table(path).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {one_line(error)}") from error
    return [Row(row, f"{path} row {number}") for number, row in enumerate(records, start=1)]


def _read_text(path: Path) -> str:
    """Read the text of a file, compressed or not."""
    try:
        data = path.read_bytes()  # browsers may decompress a .gz file
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} can't be read: {one_line(error)}; copy or download it again"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {one_line(error)}; save it as UTF-8") from error


def _read_json(path: Path) -> Iterator[Row]:
    """Read the rows of a JSON list, or of consecutive objects, one per line or indented."""
    text = _read_text(path)
    values, word = _parse_values(path, text), "line"
    if text.lstrip()[:1] == "[":
        (_, items), *others = values
        if others:
            raise DataError(
                f"{path} line {others[0][0]} follows the list of rows; write one object per line,"
                " or put all of them in the list"
            )
        values, word = enumerate(items, start=1), "row"
    has_escapes = "\\u" in text
    for number, item in values:
        origin = f"{path} {word} {number}"
        if not isinstance(item, dict):
            raise DataError(
                f"{origin}: a row must be an object with named fields, got {type(item).__name__}"
            )
        if has_escapes:
            reject_surrogates(item, origin)
        yield Row(item, origin)


def _parse_values(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield the JSON values in a text, each with the line on which it starts."""
    position, line = 0, 1
    while True:
        begin = cast("re.Match[str]", _SPACE.match(text, position)).end()
        line += text.count("\n", position, begin)
        if begin == len(text):
            return
        item, position = _parse_value(path, text, begin, line)
        yield line, item
        line += text.count("\n", begin, position)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):  # a duplicate key would be lost silently
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {duplicate!r} twice")
    return result


_DECODER = json.JSONDecoder(  # NaN is a missing value
    object_pairs_hook=_reject_duplicate_keys,
    parse_constant=lambda name: None if name == "NaN" else float(name),
)


def _parse_value(path: Path, text: str, position: int, line: int) -> tuple[Any, int]:
    """Return the JSON value at `position`, which is on `line`, and the position after it."""
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno} column {error.colno}"
        line = error.lineno if text[position] == "[" else line
    except (ValueError, RecursionError) as error:  # huge numbers, deep nesting
        reason = one_line(error).partition(";")[0]
    raise DataError(f"{path} line {line} is not valid JSON ({reason}); fix or remove the line")


def reject_surrogates(value: object, origin: str) -> None:
    """Raise DataError if a text in `value` has an unpaired surrogate, as from a truncated emoji."""
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    match = _SURROGATE.search(value)
    if match:
        raise DataError(
            f"{origin} has {match[0]!a}, an unpaired surrogate; complete the pair or remove it"
        )


def _load_hub_splits(name: str) -> dict[str, Iterator[Row]]:
    """Return the rows of a Hub data set by split, read lazily."""
    import datasets
    from datasets.config import HF_DATASETS_CACHE

    parts = _HUB_ALIASES.get(name, name).split("/")
    repository, config = "/".join(parts[:2]), "/".join(parts[2:]) or None
    cache = Path(HF_DATASETS_CACHE, repository.replace("/", "___"))
    if not cache.is_dir():
        message = f"data path {name} is neither a local file or directory nor in the Hub's cache"
        require_reachable(message, DataError, alternative="a local file")
    try:  # without a split, this loads all of them
        splits = cast("datasets.DatasetDict", datasets.load_dataset(repository, config))
    # The loader runs many readers, which raise different exceptions.
    except Exception as error:
        raise DataError(
            f"data path {name} is neither a local file or directory nor a readable data set on the"
            f" Hub ({one_line(error)}); check the name and the connection, or use a local file"
        ) from error

    def read_split(split: str) -> Iterator[Row]:
        for number, row in enumerate(splits[split], start=1):
            yield Row(cast("Mapping[str, Any]", row), f"{name} {split} row {number}")

    return {str(split): read_split(str(split)) for split in splits}


def choose_splits(
    name: str, splits: Collection[str], *, step: int | None, requested: str | None = None
) -> tuple[str, list[str]]:
    """Return the training split that `step` reads, and the matching test splits, if any.

    The training split is `requested`, else `train`, else the only split or the only `train*`, else
    the one named for the step. The test split has the same suffix or none. If there is no such
    split, all test splits are read if there is one training split, and none are read otherwise.

    Raises:
        DataError: the training split is missing, or there are several and none is for the step.
    """
    all_train = [split for split in splits if split.startswith(TRAIN)]
    train = [requested] if requested else all_train or (list(splits) if len(splits) == 1 else [])
    if TRAIN in train:
        train = [TRAIN]
    if len(train) > 1:
        words = STEP_WORDS.get(step or 0, ())
        train = [split for split in train if split.removeprefix(TRAIN).strip("_-") in words]
    if len(train) != 1 or train[0] not in splits:
        problem = f"no split {requested}" if requested else "no training split"
        if not requested and all_train:
            problem = "several training splits" + (
                f", none of them for step {step}" if step else ""
            )
        raise DataError(
            f"data path {name} has {problem}; the splits are {', '.join(sorted(splits))}: select"
            f" one, such as {name}@{(all_train or sorted(splits))[0]}"
        )
    test = [split for split in splits if re.split(r"[-_.]", split.lower())[0] in TEST_WORDS]
    if train[0] in test:
        return train[0], []
    for suffix in (train[0].removeprefix(TRAIN), ""):
        matching = [word + suffix for word in TEST_WORDS if word + suffix in test]
        if matching:
            return train[0], matching[:1]
    return train[0], test if set(all_train) <= {train[0]} else []


def _read_csv(path: Path) -> Iterator[Row]:
    """Read the rows of a CSV file.

    Cells are separated by tabs in a .tsv file, otherwise by commas or, if the first line has none,
    by semicolons or tabs. They may be quoted as in RFC 4180. Empty cells and NaN are read as None.
    """
    text = _read_text(path)
    first = text.lstrip().partition("\n")[0]
    separators = "\t" if ".tsv" in path.suffixes else ",;\t"
    delimiter = next((separator for separator in separators if separator in first), separators[0])
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    line = 1
    try:
        for cells in reader:
            origin, line = f"{path} line {line}", reader.line_num + 1
            if not cells:
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                header[0] = header[0] or "Unnamed: 0"  # the index column of pandas
                if len(set(header)) < len(header) or not all(header):
                    raise DataError(f"{origin}: the header must give each column a unique name")
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{origin}: the header has {len(header)} columns, but the row has {len(cells)};"
                    " quote text that contains separators or line breaks"
                )
            values = (None if cell.strip() in ("", "NaN", "nan") else cell for cell in cells)
            yield Row(dict(zip(header, values, strict=True)), origin)
    except csv.Error as error:
        raise DataError(f"{path} line {line} is not valid CSV ({error}); fix it") from error
