"""Where rows begin: whatever the ends of lines, however much is read at once."""

import random
from pathlib import Path

import pytest

from pipeline.data.store import line_index
from pipeline.data.store.__main__ import main
from pipeline.data.store.line_index import LineIndex, index_path, write_index
from pipeline.errors import ConfigError, DataError

PIECES = (b"\n", b"\r\n", b"a", b"bc", b"\r", b"{}\n", "é\n".encode())


def test_every_row_is_where_the_index_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.jsonl"
    for seed in range(300):
        draw = random.Random(seed)
        monkeypatch.setattr(line_index, "READ_BYTES", draw.choice((1, 2, 3, 7, 64)))
        content = b"".join(draw.choice(PIECES) for _ in range(draw.randrange(12)))
        source.write_bytes(content)

        write_index(source, index_path(source))

        index = LineIndex(index_path(source))
        rows = [index.row(number) for number in range(index.rows)]
        lines = content.split(b"\n")
        assert rows == [line.rstrip(b"\r") for line in lines if line not in (b"", b"\r")], content
        assert index.is_intact()


def test_show_prints_a_row_and_a_stale_or_damaged_index_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "elsewhere" / "a.index"
    out.parent.mkdir()
    source.write_text('{"text": "one"}\n\n{"text": "two"}\n')
    main(["index", str(source), "--out", str(out)])
    capsys.readouterr()

    main(["show", str(out), "--document", "1"])
    assert capsys.readouterr().out == '{"text": "two"}\n'
    main(["show", str(out)])
    assert "2 rows of " in capsys.readouterr().out
    whole = out.read_bytes()
    for place, sentence in (
        (9, "was not copied whole"),
        (45, "is damaged; index"),
        (0, "not an index"),
    ):
        content = bytearray(whole)
        content[place] ^= 1
        out.write_bytes(content)
        with pytest.raises(DataError, match=sentence):
            main(["show", str(out)])
    out.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="was not copied whole"):
        main(["show", str(out)])
    out.write_bytes(whole)
    with pytest.raises(ConfigError, match="--document 2 is not there"):
        main(["show", str(out), "--document", "2"])
    source.write_text('{"text": "one"}\n')
    with pytest.raises(DataError, match=r"a.jsonl changed since .*a.index was written; index it"):
        main(["show", str(out)])


def test_what_has_no_rows_to_reach_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"")

    for words, sentence in (
        ([f"{tmp_path}/a.jsonl.gz"], "is compressed, and its rows can't be reached"),
        ([str(tmp_path), "--out", f"{tmp_path}/a.index"], "is a directory; name a file"),
        ([f"{tmp_path}/b.jsonl"], "can't be read"),
    ):
        with pytest.raises(DataError, match=sentence):
            main(["index", *words])
    with pytest.raises(ConfigError, match=r"out must end in \.index"):
        main(["index", f"{tmp_path}/b.jsonl", "--out", "x"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.gz"]
