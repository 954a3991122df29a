import gzip
import json
import logging
from pathlib import Path

import pytest

from pipeline.data.store import pieces
from pipeline.data.store.config import PackConfig
from pipeline.data.store.encode import make_encoder
from pipeline.data.store.pack import pack
from pipeline.data.store.reader import TokenFile
from pipeline.data.store.sources import find_sources
from pipeline.errors import ConfigError, DataError
from tests.pipeline.data.store.corpus import EOS, byte_vocabulary, write_rows

VOCABULARY = byte_vocabulary()
TEXTS = ["", "one", "zwei\r\nlines", "<|end|> is text", "😀 \u2028 \x00", "x" * 3000, "last"] * 9


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)


def settings(out: Path, **values: object) -> PackConfig:
    return PackConfig(tokenizer="bytes", out=out, **values)  # pyright: ignore[reportArgumentType]


def packed(source: Path | list[Path], out: Path, **values: object) -> TokenFile:
    names = [source] if isinstance(source, Path) else source
    pack(find_sources([str(name) for name in names]), VOCABULARY, settings(out, **values))
    return TokenFile(out)


def texts_of(file: TokenFile) -> list[str]:
    encoder = make_encoder(VOCABULARY.definition)
    documents = [file.tokens(n).tolist() for n in range(file.documents)]
    assert all(document[-1] == EOS for document in documents)
    return [encoder.decode(document[:-1], skip_special_tokens=False) for document in documents]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n"])
@pytest.mark.parametrize("end", [True, False], ids=["ended", "unended"])
def test_documents_are_the_rows_texts_in_order(
    tmp_path: Path, newline: str, start: str, *, end: bool
) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=n % 2 == 0) for n, text in enumerate(TEXTS)]
    content = (start + (newline * 2).join(lines) + newline * end).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))

    plain = packed(tmp_path / "a.jsonl", tmp_path / "plain.tokens")
    zipped = packed(tmp_path / "a.jsonl.gz", tmp_path / "zipped.tokens")

    assert texts_of(plain) == texts_of(zipped) == TEXTS


@pytest.mark.usefixtures("small_pieces")
def test_any_length_of_rows_meets_the_borders_of_pieces(tmp_path: Path) -> None:
    """Rows of 11 bytes and up, so that lines begin, end and lie at every place of a border."""
    texts = ["y" * (n % 97) for n in range(600)] + ["z" * n for n in range(970, 1010)]
    write_rows(tmp_path / "a.jsonl", texts)

    assert texts_of(packed(tmp_path / "a.jsonl", tmp_path / "x.tokens")) == texts


@pytest.mark.usefixtures("small_pieces")
def test_the_file_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", TEXTS)
    write_rows(tmp_path / "b.jsonl", TEXTS[::-1])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    sources = [tmp_path / "*.jsonl", tmp_path / "c.jsonl.gz"]

    files = [packed(sources, tmp_path / f"{n}.tokens", workers=n) for n in (1, 2, 5)]

    assert texts_of(files[0]) == [*TEXTS, *TEXTS[::-1], *TEXTS[::-1]]
    assert len({file.path.read_bytes() for file in files}) == 1


BAD = {
    3: (b'{"text": "cut', "it is not JSON: Unterminated string starting at at column 10"),
    5: (b'["a"]', "it is not an object, but a list"),
    6: (b'{"test": "a"}', "it has no field 'text'"),
    8: (b'{"text": null}', "its field 'text' is not text, but null"),
    9: (b'{"text": "\xff"}', "it is not UTF-8 at byte 10"),
    10: (b'{"text": "\\ud800"}', "its text has half a surrogate pair at character 0"),
    12: (b"[" * 60000, "it is longer than --max-row, 50,000 bytes"),
    13: (b"[" * 40000, "it is not JSON that can be read: nested too deep, or a number too long"),
}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_bad_rows_are_named_by_their_line_and_counted(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = json.dumps({"text": "good" * 60}).encode()
    lines = [BAD[n][0] if n in BAD else good for n in range(1, 20)]
    content = b"\n".join(lines)
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)

    with caplog.at_level(logging.WARNING):
        file = packed(path, tmp_path / "x.tokens", on_bad_row="skip", max_row=50000)

    assert texts_of(file) == ["good" * 60] * 11
    assert file.origin.bad_rows == len(BAD)
    assert [record.getMessage() for record in caplog.records] == [
        f"left out {path}:{line}: {reason}" for line, (_, reason) in BAD.items()
    ]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n<|end|> two")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_bytes(b"a\xff")
    (tmp_path / "d.txt").write_text("x" * 101)

    file = packed(tmp_path / "*.txt", tmp_path / "x.tokens", on_bad_row="skip", max_row=100)

    assert texts_of(file) == ["one\r\n\n<|end|> two"]
    assert file.origin.bad_rows == 2
    with pytest.raises(DataError, match=r"c.txt:1: it is not UTF-8 at byte 1"):
        packed(tmp_path / "c.txt", tmp_path / "y.tokens")


def test_zstandard_is_read_frame_by_frame_and_to_its_end(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the package zstandard is not installed")
    write_rows(tmp_path / "a.jsonl", [f"text {n}" * 9 for n in range(300)])
    rows = (tmp_path / "a.jsonl").read_bytes()
    halves = [zstandard.ZstdCompressor().compress(part) for part in (rows[:5000], rows[5000:])]
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(halves))

    plain, packed_twice = (
        packed(tmp_path / name, tmp_path / f"{name}.tokens") for name in ("a.jsonl", "b.jsonl.zst")
    )

    assert texts_of(packed_twice) == texts_of(plain)
    for size, name in ((-7, "cut"), (len(halves[0]) - 3, "first")):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(b"".join(halves)[:size])
        with pytest.raises(DataError, match=rf"{name}.jsonl.zst is not a whole Zstandard file"):
            packed(tmp_path / f"{name}.jsonl.zst", tmp_path / f"{name}.tokens")


def test_a_bad_row_ends_the_command_and_it_goes_on_without(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"txet": "b"}\n{"text": "c"}\n')

    with pytest.raises(DataError, match=r"a.jsonl:2: it has no field 'text'; repair"):
        packed(tmp_path / "a.jsonl", tmp_path / "x.tokens")
    assert not (tmp_path / "x.tokens").exists()

    file = packed(tmp_path / "a.jsonl", tmp_path / "x.tokens", resume=True, on_bad_row="skip")
    assert texts_of(file) == ["a", "c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "x.tokens"]


def test_what_can_not_be_packed_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "b.csv").write_text("text")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 999)[:60])
    out = tmp_path / "x.tokens"

    with pytest.raises(DataError, match=r"no file .*none\*.jsonl"):
        packed(tmp_path / "none*.jsonl", out)
    with pytest.raises(DataError, match=r"is a directory; name its files"):
        packed(tmp_path, out)
    with pytest.raises(DataError, match=r"b.csv is none of what can be packed: .jsonl, "):
        packed(tmp_path / "b.csv", out)
    with pytest.raises(DataError, match=r"cut.jsonl.gz is not a whole gzip file"):
        packed(tmp_path / "cut.jsonl.gz", tmp_path / "cut.tokens")
    with pytest.raises(DataError, match=r"no row of .* has a text"):
        packed(tmp_path / "empty.jsonl", tmp_path / "empty.tokens")
    packed(tmp_path / "a.jsonl", out, resume=True)
    with pytest.raises(ConfigError, match="already exists"):
        packed(tmp_path / "a.jsonl", out)
