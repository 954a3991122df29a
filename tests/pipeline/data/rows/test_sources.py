import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from pipeline.data.rows.sources import Source, read_source
from pipeline.system.errors import DataError

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


def get_rows(source: Source) -> list[dict[str, Any]]:
    return [dict(row.columns) for row in source.train]


def get_error_message(spec: object) -> str:
    with pytest.raises(DataError) as raised:
        read_source(str(spec))
    return str(raised.value)


@pytest.mark.parametrize(
    "name", ["rows.json", "rows.jsonl", "rows.jsonl.gz", "rows.json.gz", "rows.parquet"]
)
def test_every_file_format_yields_its_rows_in_order(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name)

    source = read_source(str(path))

    assert get_rows(source) == ROWS
    assert source.eval == []
    if name.endswith(".gz"):
        path.write_bytes(gzip.decompress(path.read_bytes()))  # as browsers do
        assert get_rows(read_source(str(path))) == ROWS
    word = "row" if name.endswith("parquet") else "line"
    assert [row.origin for row in source.train] == [f"{path} {word} 1", f"{path} {word} 2"]


@pytest.mark.parametrize(
    "test_file",
    [
        "test.jsonl.gz",
        "val.jsonl",
        "eval.json",
        "validation-00000-of-00001.parquet",
        "dev_1.json",
        "test/a.jsonl",
    ],
)
def test_directory_keeps_its_test_split(test_file: str, tmp_path: Path) -> None:
    write(tmp_path / "train-1.jsonl", ROWS[:1])
    write(tmp_path / "evaluation_prompts.parquet" / "part-0.parquet", ROWS[1:])  # as Spark does
    write(tmp_path / test_file, [{"prompt": "held", "response": "out"}])
    (tmp_path / "README.md").write_text("not data")
    write(tmp_path / ".cache" / "x.jsonl", ROWS)
    write(tmp_path / "dataset_info.json", [{"splits": {}}])

    source = read_source(f"{tmp_path}:2")

    assert sorted(row["prompt"] for row in get_rows(source)) == ["a", "ç"]
    assert [row.columns["prompt"] for row in source.eval] == ["held"]
    assert source.weight == 2.0


ULTRACHAT = ("train_sft", "test_sft", "train_gen", "test_gen")
ULTRAFEEDBACK = (*ULTRACHAT, "train_prefs", "test_prefs")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that caches a Hub data set with the given splits and returns its name."""
    import datasets

    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def make(*splits: str) -> str:
        card = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
        for split in splits:
            write(tmp_path / "made" / f"{split}.jsonl", [{"text": split}, {"text": f"{split} 2"}])
        (tmp_path / "made" / "README.md").write_text(
            f"---\nconfigs:\n- config_name: default\n  data_files:\n{card}---\n"
        )
        datasets.load_dataset(str(tmp_path / "made"), cache_dir=str(cache))
        (cache / "made").rename(cache / "owner___made")
        return "owner/made"

    return make


def read_texts(name: str, step: int | None) -> tuple[list[str], list[str]]:
    source = read_source(name, step=step)
    train, test = (
        [row.columns["text"] for row in rows if not row.columns["text"].endswith(" 2")]
        for rows in (source.train, source.eval)
    )
    assert (len(source.train), len(source.eval)) == (2 * len(train), 2 * len(test))
    numbers = [row.origin.rpartition(" ")[2] for row in (*source.train, *source.eval)]
    assert numbers == ["1", "2"] * (len(train) + len(test))
    return train, test


@pytest.mark.parametrize(
    ("splits", "step", "train", "test"),
    [
        (("train", "test", "validation"), 1, "train", "test"),
        (("train", "validation"), 2, "train", "validation"),
        (("train", "dev"), None, "train", "dev"),
        (("train", "extra"), 3, "train", ""),
        (("data",), 1, "data", ""),
        (("train_sft", "test_sft"), 3, "train_sft", "test_sft"),
        (ULTRACHAT, 1, "train_sft", "test_sft"),
        (ULTRACHAT, 3, "train_gen", "test_gen"),
        (ULTRAFEEDBACK, 2, "train_prefs", "test_prefs"),
        (("train", "train_sft", "test"), 1, "train", "test"),
        (("train_sft", "train_gen", "test"), 1, "train_sft", "test"),
    ],
)
def test_step_reads_its_training_and_test_splits_of_a_hub_set(
    hub: Callable[..., str], splits: tuple[str, ...], step: int | None, train: str, test: str
) -> None:
    assert read_texts(hub(*splits), step) == ([train], [test] if test else [])


def test_directory_of_split_files_is_read_like_a_hub_set(tmp_path: Path) -> None:
    for split in ULTRAFEEDBACK:
        row = [{"text": split}]
        write(tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet", row)
    for name in ("train_a", "train_b", "test"):
        write(tmp_path / "plain" / f"{name}.jsonl", [{"text": name}])

    prefs = read_source(str(tmp_path / "set"), step=2)
    train_b = read_source(f"{tmp_path / 'plain'}@train_b")

    prefs_texts = [row.columns["text"] for row in (*prefs.train, *prefs.eval)]
    assert prefs_texts == ["train_prefs", "test_prefs"]
    assert prefs.splits == "train_prefs, and test_prefs for evaluation"
    assert "several training splits" in get_error_message(tmp_path / "set")
    plain = read_source(str(tmp_path / "plain"))
    assert [row.columns["text"] for row in plain.train] == ["train_a", "train_b"]
    assert [row.columns["text"] for row in (*train_b.train, *train_b.eval)] == ["train_b", "test"]


def test_suffix_of_a_split_names_its_step(tmp_path: Path) -> None:
    words = {1: "sft", 2: "prefs pref preference preferences rm reward", 3: "gen ppo rl prompts"}
    for step, suffixes in words.items():
        other = step % 3 + 1
        for suffix in suffixes.split():
            write(tmp_path / suffix / f"train_{suffix}.jsonl", ROWS[:1])
            write(tmp_path / suffix / f"train_{words[other].split()[0]}.jsonl", ROWS[1:])
            assert get_rows(read_source(str(tmp_path / suffix), step=step)) == ROWS[:1]
            assert get_rows(read_source(str(tmp_path / suffix), step=other)) == ROWS[1:]


def test_unreachable_hub_name_raises_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    message = get_error_message("nobody/nothing-of-the-kind")

    assert message.startswith("data path nobody/nothing-of-the-kind is neither a local file or")
    assert "use a local file" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a \\ud83d"}', "an unpaired surrogate"),
        ('{"prompt": {"a": ["\\uDE00"]}}', "an unpaired surrogate"),
        ('{"prompt": %s}' % ("9" * 5000), "is not valid JSON .*digits"),
        ('{"prompt": %s}' % ("[" * 100_000), "is not valid JSON .*recursion"),
        ('{"prompt": "a",', "is not valid JSON"),
        ('{"prompt": "a", "prompt": "b"}', "an object has the key 'prompt' twice"),
    ],
    ids=range(6),
)
def test_invalid_json_row_raises_with_its_line(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "\\ud83d\\ude00"}}\n{line}\n')

    with pytest.raises(DataError, match=f"{path} line 2 .*{reason}"):
        read_source(str(path))


def test_json_objects_may_be_indented(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\n\ufeff\n".join(json.dumps(row, indent=2) for row in ROWS))

    source = read_source(str(path))

    assert get_rows(source) == ROWS
    assert [row.origin for row in source.train] == [f"{path} line 1", f"{path} line 6"]


@pytest.mark.parametrize("text", ['[{"a": "x", "b": NaN}]', "a,b\nx,NaN\n", "a\tb\nx\t\n"])
def test_nan_is_read_as_a_missing_value(text: str, tmp_path: Path) -> None:
    path = tmp_path / ("rows.json" if text[0] == "[" else "rows.csv")
    path.write_text(text)

    assert get_rows(read_source(str(path))) == [{"a": "x", "b": None}]


def test_text_after_a_json_list_raises(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS) + "\n" + json.dumps(ROWS[0]))

    assert "line 2 follows the list of rows" in get_error_message(path)
    path.write_text(json.dumps([*ROWS, {}], indent=0).replace("{}", ""))
    assert "line 11 is not valid JSON" in get_error_message(path)


def test_pandas_index_is_a_separate_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",prompt,response\n0,a,b\n")

    assert get_rows(read_source(str(path))) == [{"Unnamed: 0": "0", "prompt": "a", "response": "b"}]


def test_directory_written_by_save_to_disk_raises(tmp_path: Path) -> None:
    (tmp_path / "data-00000-of-00001.arrow").touch()

    assert "save it with to_parquet, not save_to_disk" in get_error_message(tmp_path)
