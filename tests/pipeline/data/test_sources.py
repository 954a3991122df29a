import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from pipeline.data.sources import Source, hub_rows, read_source, split_weight
from pipeline.errors import DataError

ROWS = [{"prompt": "a", "response": "b"}, {"prompt": "ç", "response": "d"}]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return path


def columns(source: Source) -> list[dict[str, Any]]:
    return [dict(row.columns) for row in source.train]


def refused(spec: object) -> str:
    with pytest.raises(DataError) as raised:
        read_source(str(spec))
    return str(raised.value)


@pytest.mark.parametrize(
    "name", ["rows.json", "rows.jsonl", "rows.jsonl.gz", "rows.json.gz", "rows.parquet"]
)
def test_every_kind_of_file_gives_its_rows_in_order(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name)

    source = read_source(str(path))

    assert columns(source) == ROWS
    assert source.eval == []
    word = "row" if name.endswith("parquet") else "line"
    assert [row.origin for row in source.train] == [f"{path} {word} 1", f"{path} {word} 2"]


def test_a_json_file_may_be_one_list(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=2))

    source = read_source(str(path))

    assert columns(source) == ROWS
    assert source.train[1].origin == f"{path} row 2"


def test_line_numbers_count_empty_lines_and_separators_inside_strings(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"text": "one\u2028line"}\r\n\n{"text": "two"}\n', encoding="utf-8-sig")

    rows = read_source(str(path)).train

    assert [(row.columns["text"], row.origin) for row in rows] == [
        ("one\u2028line", f"{path} line 2"),
        ("two", f"{path} line 4"),
    ]


def test_a_number_at_the_end_is_a_weight() -> None:
    assert split_weight("rows.jsonl:0.5") == ("rows.jsonl", 0.5)
    assert split_weight("owner/name:3") == ("owner/name", 3.0)
    assert split_weight("rows.jsonl") == ("rows.jsonl", None)
    assert split_weight("C:\\data\\rows.jsonl") == ("C:\\data\\rows.jsonl", None)
    assert split_weight("C:\\data\\rows.jsonl:2") == ("C:\\data\\rows.jsonl", 2.0)
    with pytest.raises(DataError, match="a weight must be above 0"):
        split_weight("rows.jsonl:0")


def test_a_file_whose_name_ends_like_a_weight_is_a_file(tmp_path: Path) -> None:
    write(tmp_path / "run:1" / "rows.jsonl")

    source = read_source(f"{tmp_path}/run:1")

    assert source.weight is None
    assert columns(source) == ROWS


@pytest.mark.parametrize(
    "test_file",
    [
        "test.jsonl.gz",
        "eval.json",
        "validation-00000-of-00001.parquet",
        "dev_1.json",
        "test/a.jsonl",
    ],
)
def test_a_directory_keeps_its_test_split(test_file: str, tmp_path: Path) -> None:
    write(tmp_path / "train-1.jsonl", ROWS[:1])
    write(tmp_path / "evaluation_prompts.jsonl", ROWS[1:])
    write(tmp_path / test_file, [{"prompt": "held", "response": "out"}])
    (tmp_path / "README.md").write_text("not data")
    write(tmp_path / ".cache" / "x.jsonl", ROWS)

    source = read_source(f"{tmp_path}:2")

    assert sorted(row["prompt"] for row in columns(source)) == ["a", "ç"]
    assert [row.columns["prompt"] for row in source.eval] == ["held"]
    assert source.weight == 2.0


def test_a_directory_of_test_files_alone_gives_them_as_rows(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl")

    source = read_source(str(tmp_path))

    assert columns(source) == ROWS
    assert source.eval == []


def test_local_jsonfile_is_deepspeed_chats_pair_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused("local/jsonfile") == "data path data/train.json: there is no such file"
    write(tmp_path / "data" / "train.json", ROWS[:1])
    write(tmp_path / "data" / "eval.json", ROWS[1:])

    source = read_source("local/jsonfile")

    assert (columns(source), source.eval[0].columns) == (ROWS[:1], ROWS[1])


@pytest.mark.parametrize("path", ["no/such.jsonl", "./nothing", "/no/where/at/all", "what:ever"])
def test_a_missing_file_is_named(path: str) -> None:
    assert refused(path) == f"data path {path}: there is no such file or directory"


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"\n')

    assert refused(path).startswith(f"{path} line 2 is not valid JSON")
    path.write_text('[{"prompt": "a"},\n {"prompt": }]')
    assert refused(path).startswith(f"{path} line 2 is not valid JSON")


def test_a_row_that_is_not_an_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n"just text"\n')

    assert refused(path) == f"{path} line 2: a row is an object with named fields, got str"


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.jsonl.gz"])
def test_an_empty_file_is_named(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [])

    assert refused(path) == f"{path} holds no rows"


def test_files_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    (tmp_path / "b.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n')[:-9])
    (tmp_path / "d.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    (tmp_path / "e.csv").write_text("prompt,response\n")
    (tmp_path / "f").mkdir()

    assert f"{tmp_path}/a.parquet is not a readable parquet file" in refused(tmp_path / "a.parquet")
    assert f"{tmp_path}/b.jsonl.gz can't be read" in refused(tmp_path / "b.jsonl.gz")
    assert f"{tmp_path}/c.jsonl.gz can't be read" in refused(tmp_path / "c.jsonl.gz")
    assert f"{tmp_path}/d.jsonl is not UTF-8 text" in refused(tmp_path / "d.jsonl")
    assert ".csv can't be read; give one of .json" in refused(tmp_path / "e.csv")
    assert "holds no .json" in refused(tmp_path / "f")


@pytest.mark.parametrize(
    ("splits", "train", "test"),
    [
        (["train", "test", "validation"], ["train"], ["test"]),
        (["train", "validation"], ["train"], ["validation"]),
        (["train", "dev"], ["train"], ["dev"]),
        (["train", "extra"], ["train"], []),
        (["data"], ["data"], []),
        (["train_sft", "test_sft", "train_gen"], ["train_sft", "train_gen"], ["test_sft"]),
    ],
)
def test_hub_splits_become_training_and_evaluation_rows(
    splits: list[str], train: list[str], test: list[str]
) -> None:
    from datasets import Dataset, DatasetDict

    loaded = DatasetDict({name: Dataset.from_list([{"text": name}]) for name in splits})

    rows, held_out = hub_rows("owner/name", dict(loaded))

    assert [row.columns["text"] for row in rows] == train
    assert [row.columns["text"] for row in held_out] == test
    assert rows[0].origin == f"owner/name {train[0]} row 1"


def test_hub_splits_without_training_rows_are_named() -> None:
    with pytest.raises(DataError, match="owner/name has no train split, it has a, b"):
        hub_rows("owner/name", {"a": [], "b": []})


def test_a_hub_name_that_can_not_be_reached_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    message = refused("nobody/nothing-of-the-kind")

    assert message.startswith("data path nobody/nothing-of-the-kind is neither a file or directory")
    assert "give a local file" in message
    assert "\n" not in message
