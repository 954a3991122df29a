"""Packing texts: the documents, bad rows, workers, and resuming."""

import gzip
import json
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pipeline.data.store import pack as module
from pipeline.data.store.pack import find_sources, pack
from pipeline.data.store.token_file import TokenFile
from pipeline.system.errors import ConfigError, DataError
from tests.pipeline.data.store.corpus import EOS, byte_vocabulary, write_rows

VOCABULARY = byte_vocabulary()
TEXTS = ["", "one", "zwei\r\nlines", "<|end|> is text", "😀 \u2028 \x00", "x" * 3000, "last"] * 9


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)


def run_pack(source: Path | list[Path], out: Path, **settings: object) -> TokenFile:
    names = [source] if isinstance(source, Path) else source
    return pack(find_sources([str(name) for name in names]), VOCABULARY, out, **settings)


def read_texts(file: TokenFile) -> list[str]:
    tokenizer = Tokenizer.from_str(VOCABULARY.definition)
    documents = [file.tokens(n).tolist() for n in range(file.num_documents)]
    assert all(document.index(EOS) == len(document) - 1 for document in documents)
    return [tokenizer.decode(document[:-1], skip_special_tokens=False) for document in documents]


def read_output_files(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx", "json")]


@pytest.mark.parametrize(
    ("newline", "start", "is_ended"),
    [("\n", "", True), ("\r\n", "\ufeff", False), ("\n", "\n\n", False), ("\r\n", "", True)],
)
def test_documents_are_the_row_texts_in_order(
    newline: str, start: str, is_ended: bool, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=n % 2 == 0) for n, text in enumerate(TEXTS)]
    content = (start + (newline * 2).join(lines) + newline * is_ended).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))

    plain = run_pack(tmp_path / "a.jsonl", tmp_path / "plain")
    zipped = run_pack(tmp_path / "a.jsonl.gz", tmp_path / "zipped")

    assert read_texts(plain) == read_texts(zipped) == TEXTS


def test_output_files_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", TEXTS)
    write_rows(tmp_path / "b.jsonl", TEXTS[::-1])

    files = [run_pack(tmp_path / "*.jsonl", tmp_path / f"{n}", workers=n) for n in (1, 2)]

    assert read_texts(files[0]) == [*TEXTS, *TEXTS[::-1]]
    assert read_output_files(tmp_path / "1") == read_output_files(tmp_path / "2")
    # Workers ignore Ctrl-C.
    with ProcessPoolExecutor(1, get_context("spawn"), module._init_worker) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN


def test_resume_keeps_finished_pieces_and_rejects_changed_sources(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", TEXTS)
    source = tmp_path / "a.jsonl"
    content = source.read_bytes()
    source.write_bytes(content[:-12] + b'{"txet":"l"}')
    with pytest.raises(DataError):
        run_pack(source, tmp_path / "x")
    pieces = sorted((tmp_path / "x.pieces").glob("*.npz"))
    with pytest.raises(ConfigError, match="unfinished run"):
        run_pack(source, tmp_path / "x")
    modified = source.stat().st_mtime_ns
    source.write_bytes(b"?" * 1000 + source.read_bytes()[1000:])  # a finished piece is not read
    os.utime(source, ns=(modified, modified))

    file = run_pack(source, tmp_path / "x", resume=True, skip_bad_rows=True)

    assert len(pieces) > 20
    assert read_texts(file) == TEXTS[:-1]
    assert not (tmp_path / "x.pieces").exists()
    with pytest.raises(DataError):
        run_pack(source, tmp_path / "y")
    source.write_bytes(content)
    with pytest.raises(ConfigError, match="different source files"):
        run_pack(source, tmp_path / "y", resume=True)


def test_bad_row_is_reported_with_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [json.dumps({"text": "x" * 90}), '{"text": null}', "[1]", '{"text": "\\ud83d"}', "{"] * 9
    (tmp_path / "a.jsonl").write_text("\n".join(rows))

    file = run_pack(tmp_path / "a.jsonl", tmp_path / "a", skip_bad_rows=True)

    messages = [record.getMessage() for record in caplog.records]  # also progress, if it is slow
    lines = [int(message.split(":")[1]) for message in messages if message.startswith("skipped")]
    assert lines == [number for number in range(1, 46) if number % 5 != 1]
    assert read_texts(file) == ["x" * 90] * 9
    assert file.origin is not None
    assert (file.origin.bad_rows, file.dtype.itemsize) == (36, 2)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"x" * 999)[:-9])
    with pytest.raises(DataError, match=r"b.jsonl.gz can't be read"):
        run_pack(tmp_path / "b.jsonl.gz", tmp_path / "b")
