import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.store import layout as layouts
from pipeline.data.store import reader as readers
from pipeline.data.store import writer as writers
from pipeline.data.store.check import findings
from pipeline.data.store.reader import TokenFile
from pipeline.errors import DataError
from tests.pipeline.data.store.corpus import EOS, ORIGIN, write_tokens

DOCUMENTS = [[1, 2, EOS], [EOS], [299, 7, 7, 7, EOS]]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layouts, readers, writers):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)


def test_the_bytes_are_those_of_the_documented_layout(tmp_path: Path) -> None:
    write_tokens(tmp_path / "x.tokens", DOCUMENTS)

    content = (tmp_path / "x.tokens").read_bytes()
    *numbers, length = struct.unpack_from("<8sIBBHQQI", content)
    assert numbers == [b"RLTOKENS", 1, 2, 0, 0, 9, 3]
    zeroed = content[:36] + bytes(4) + content[40:4096]
    assert struct.unpack_from("<I", content, 36)[0] == zlib.crc32(zeroed)
    assert json.loads(content[40 : 40 + length])["tokenizer_hash"] == ORIGIN.tokenizer_hash
    assert content[40 + length : 4096] == bytes(4056 - length)
    assert struct.unpack_from("<9H", content, 4096) == (1, 2, 256, 256, 299, 7, 7, 7, 256)
    assert content[4114:4160] == bytes(46)
    assert struct.unpack_from("<3Q", content, 4160) == (3, 4, 9)
    crcs = struct.pack("<I", zlib.crc32(content[4096:4184]))
    assert content[4184:4188] == crcs
    footer = struct.pack("<QQQI", 4160, 4184, 1, zlib.crc32(crcs))
    assert content[4188:] == footer + struct.pack("<I", zlib.crc32(footer)) + b"RLTOKEND"


def test_documents_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_tokens(tmp_path / "x.tokens", DOCUMENTS)

    file = TokenFile(tmp_path / "x.tokens")

    assert [file.tokens(i).tolist() for i in range(file.documents)] == DOCUMENTS
    assert file.origin == ORIGIN
    assert not list(findings(file))
    assert [path.name for path in tmp_path.iterdir()] == ["x.tokens"]
    with pytest.raises(IndexError):
        file.tokens(3)


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    origin = replace(ORIGIN, vocabulary=2**16 + 1, eos=2**16)
    write_tokens(tmp_path / "x.tokens", [[2**16 - 1, 2**16]], origin)

    assert TokenFile(tmp_path / "x.tokens").tokens(0).tolist() == [2**16 - 1, 2**16]
    assert replace(origin, vocabulary=2**16).width == 2


@pytest.mark.usefixtures("small_blocks")
def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    write_tokens(path, [*DOCUMENTS * 12])
    whole = path.read_bytes()
    layout = TokenFile(path).layout
    assert layout.blocks == 9

    for position in [*range(0, 330, 7), 4095, *range(4096, len(whole))]:
        changed = bytearray(whole)
        changed[position] ^= 1 << (position % 8)
        path.write_bytes(changed)
        if 4096 <= position < layout.crcs_begin:
            wrong = list(findings(TokenFile(path)))
            assert len(wrong) == 1
            assert f"block {(position - 4096) // 64} " in wrong[0]
        else:
            with pytest.raises(DataError):
                TokenFile(path)


@pytest.mark.usefixtures("small_blocks")
def test_the_reader_refuses_documents_of_a_damaged_block_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    write_tokens(path, [[n] * 31 + [EOS] for n in range(4)])  # 64 bytes each
    content = bytearray(path.read_bytes())
    content[4096 + 2 * 64 + 5] ^= 1
    path.write_bytes(content)

    file = TokenFile(path)

    assert [int(file.tokens(n)[0]) for n in (0, 1, 3)] == [0, 1, 3]
    with pytest.raises(DataError, match=r"block 2 \(bytes 4,224 to 4,288\) differs"):
        file.tokens(2)


def test_a_file_that_was_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    write_tokens(path, DOCUMENTS)
    whole = path.read_bytes()

    for size in [*range(0, 4096, 101), *range(4090, len(whole))]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"not copied whole|not a token file"):
            TokenFile(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="goes on after byte 4,228"):
        TokenFile(path)


def test_what_is_no_token_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')

    with pytest.raises(DataError, match=r"rows.jsonl is not a token file"):
        TokenFile(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="can't be read: Is a directory"):
        TokenFile(tmp_path)
    with pytest.raises(DataError, match="can't be read: No such file"):
        TokenFile(tmp_path / "none.tokens")


@pytest.mark.parametrize(
    ("documents", "sentence"),
    [
        ([[1, EOS], [300, EOS]], "token 2 is 300, and the vocabulary has 300"),
        ([[1, EOS], [1, 2]], "document 1 does not end with eos, 256"),
        ([[1, EOS], []], "document 1 has no tokens"),
    ],
)
def test_verify_names_what_can_not_be(
    tmp_path: Path, documents: list[list[int]], sentence: str
) -> None:
    write_tokens(tmp_path / "x.tokens", documents)

    assert [each.partition(": ")[2] for each in findings(TokenFile(tmp_path / "x.tokens"))] == [
        sentence
    ]


def test_names_that_do_not_fit_are_left_out_of_the_header(tmp_path: Path) -> None:
    origin = replace(ORIGIN, files=50, names=tuple("語" * 90 + str(n) for n in range(50)))
    write_tokens(tmp_path / "x.tokens", DOCUMENTS, origin)

    read = TokenFile(tmp_path / "x.tokens").origin
    assert 1 <= len(read.names) < 16
    assert read == replace(origin, names=origin.names[: len(read.names)])


def test_a_file_that_another_program_changed_gets_no_name(tmp_path: Path) -> None:
    with writers.TokenWriter(tmp_path / "x.tokens", 2) as writer:
        writer.append(np.array([1, EOS]), np.array([2]))
        writer.flush()
        with (tmp_path / "x.tokens.writing").open("ab") as file:
            file.write(b"\0\0")

        with pytest.raises(DataError, match="another program changed it"):
            writer.finish(ORIGIN)
    assert not (tmp_path / "x.tokens").exists()
