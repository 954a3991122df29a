"""Megatron's files, and the commands that rewrite and verify them."""

import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.store.__main__ import main
from pipeline.data.store.token_file import DTYPES, TokenFile
from pipeline.demo.model import build_tokenizer
from pipeline.system.errors import UserError
from tests.pipeline.data.store.corpus import EOS, ORIGIN, write_tokens

DOCUMENTS = [[1, 2, EOS], [EOS], [250, 7, 7, 7, EOS]]


def read(path: Path) -> list[list[int]]:
    file = TokenFile(path)
    return [file.tokens(number).tolist() for number in range(file.num_documents)]


def write_megatron(path: Path, documents: list[list[list[int]]], code: int) -> None:
    """Write documents of several sequences, as Megatron's builder does."""
    dtype = np.dtype(DTYPES[code])
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * dtype.itemsize
    firsts = np.cumsum([0, *map(len, documents)], dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sequences), len(firsts))
    index = header + lengths.tobytes() + offsets.tobytes() + firsts.tobytes()
    path.with_suffix(".idx").write_bytes(index)
    path.with_suffix(".bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())


def test_written_documents_are_read_back(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "c.tokens", DOCUMENTS)

    assert read(tmp_path / "c.tokens") == read(tmp_path / "c.tokens.bin") == DOCUMENTS
    assert file.origin == ORIGIN
    assert file.slice(2, 5).tolist() == [EOS, EOS, 250]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"c.tokens.{suffix}" for suffix in ("bin", "idx", "json", "sha256")
    ]
    with pytest.raises(IndexError):
        file.tokens(3)


@pytest.mark.parametrize("code", [4, 5, 8])
def test_sequences_of_a_megatron_document_are_joined(code: int, tmp_path: Path) -> None:
    documents = [[[1, 2], [3]], [], [[4], [], [5, 6]]]
    write_megatron(tmp_path / "m", documents, code)

    file = TokenFile(tmp_path / "m.idx")

    assert read(tmp_path / "m") == [[1, 2, 3], [], [4, 5, 6]]
    assert file.origin is None


def test_verify_detects_every_changed_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(tmp_path / "c", DOCUMENTS)
    main(["verify", f"{tmp_path}/c"])
    assert "no errors found" in capsys.readouterr().out

    for name in ("c.idx", "c.bin"):
        content = bytearray((tmp_path / name).read_bytes())
        for position in range(len(content)):
            content[position] ^= 4
            (tmp_path / name).write_bytes(content)
            with pytest.raises(SystemExit) as stopped:
                main(["verify", f"{tmp_path}/c"])
            assert stopped.value.code == 2
            content[position] ^= 4
        (tmp_path / name).write_bytes(content)

    (tmp_path / "c.sha256").write_text(f"{'0' * 64}  d.bin\n")
    with pytest.raises(SystemExit):
        main(["verify", f"{tmp_path}/c"])
    assert "d.bin is missing" in capsys.readouterr().out


def test_shuffle_and_merge_keep_every_document(tmp_path: Path) -> None:
    rng = random.Random(0)
    documents = [[*rng.choices(range(EOS), k=rng.randrange(9)), EOS] for _ in range(300)]
    write_tokens(tmp_path / "a", documents[:200])
    write_tokens(tmp_path / "b", documents[200:])

    main(["merge", f"{tmp_path}/a", f"{tmp_path}/b.bin", "--out", f"{tmp_path}/new/c"])
    for seed in (1, 2):
        main(["shuffle", f"{tmp_path}/new/c", "--seed", f"{seed}", "--out", f"{tmp_path}/{seed}"])

    assert read(tmp_path / "new" / "c") == documents
    first, second = read(tmp_path / "1"), read(tmp_path / "2")
    assert sorted(first) == sorted(second) == sorted(documents)
    assert first not in (second, documents)
    assert TokenFile(tmp_path / "1").origin == ORIGIN


def test_pack_and_show_use_the_tokenizer_in_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "a.jsonl").write_text('{"text": "sun and moon"}\n')
    out = f"{tmp_path}/c.tokens"

    main(["pack", f"{tmp_path}/a.jsonl", "--tokenizer", f"{tmp_path}/model", "--out", out])
    main(["show", out])
    main(["show", out, "--document", "0"])

    printed = capsys.readouterr().out
    assert printed.count("c.tokens: 1 document, ") == 2
    assert "SHA-256" in printed
    assert "sun and moon" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "c", "--document", "3"], "--document must be from 0 to 2, got 3"),
        (["show", "c", "--document", "-1"], "--document must be from 0 to 2, got -1"),
        (["show", "bare", "--document", "0"], "does not record its tokenizer"),
        (["show", "c", "--document", "2", "--tokenizer", "model"], "not packed with"),
        (["merge", "c", "other", "--out", "o"], "have different tokenizers"),
        (["merge", "c", "c.bin", "--out", "c.idx"], "c already exists"),
        (["shuffle", "c", "c", "--out", "o"], "shuffle takes one file, got 2"),
        (["pack", "a.txt", "--tokenizer", "model", "--out", "o", "--workers", "0"], "--workers"),
        (["pack", "a.txt", "--out", "o"], "--tokenizer; .* --help lists the options"),
        (["pack", "a.txt", "--tokenizer", "model", "--out", "o"], "no file has a row .* a.txt"),
        (["show", "model"], "token file model can't be read"),
        (["show", "empty"], "empty has no tokens"),
        (["show", "version"], r"unknown version \(2\) or token type \(8\)"),
        (["show", "type"], r"unknown version \(1\) or token type \(7\)"),
    ],
)
def test_invalid_command_raises(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build_tokenizer().save_pretrained("model")
    Path("model", "config.json").write_text('{"model_type": "llama"}')
    Path("a.txt").write_text(" \n")
    write_tokens(Path("c"), DOCUMENTS)
    write_tokens(Path("other"), DOCUMENTS, replace(ORIGIN, tokenizer_hash="0" * 64))
    write_tokens(Path("bare"), DOCUMENTS, None)
    write_megatron(Path("empty"), [[[]]], 8)
    index = Path("c.idx").read_bytes()
    for name in ("version", "type"):
        Path(f"{name}.bin").write_bytes(Path("c.bin").read_bytes())
    Path("version.idx").write_bytes(index[:9] + b"\2" + index[10:])
    Path("type.idx").write_bytes(index[:17] + b"\7" + index[18:])

    with pytest.raises(UserError, match=message):
        main(argv)
