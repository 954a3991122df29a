"""Rows of token files: every token in one of them, no sequence of two documents."""

import random
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.corpus.rows import EVERY, Documents, FileRows, Windows
from pipeline.data.store.reader import TokenFile
from tests.pipeline.data.store.corpus import EOS, write_tokens

BOS = 257


def write(path: Path, lengths: list[int], *, seed: int = 0) -> list[list[int]]:
    """A token file of documents of these lengths, eos included."""
    draw = random.Random(seed)
    documents = [[draw.randrange(EOS) for _ in range(length - 1)] + [EOS] for length in lengths]
    write_tokens(path, documents)
    return documents


def sequences(rows: FileRows) -> list[list[list[int]]]:
    return [[ids.tolist() for ids in rows[row].sequences()] for row in range(len(rows))]


def test_windows_follow_one_another_and_are_cut_between_documents(tmp_path: Path) -> None:
    path = tmp_path / "c.tokens"
    a, b, c = write(path, [3, 9, 2])

    found = sequences(Windows(TokenFile(path), 4, None))

    assert found == [[a, b[:1]], [b[1:5]], [b[5:9]], [c]]


def test_bos_stands_before_documents_and_no_sequence_is_longer_than_a_row(tmp_path: Path) -> None:
    path = tmp_path / "c.tokens"
    a, b, c = write(path, [3, 9, 2])

    rows = Windows(TokenFile(path), 5, BOS)

    assert sequences(rows) == [[[BOS, *a], [BOS, *b[:1]]], [b[1:5]], [b[5:9]], [[BOS, *c]]]
    assert [len(rows[row]) for row in range(4)] == [6, 4, 4, 3]
    assert [rows[row].num_targets for row in range(4)] == [4, 3, 3, 2]
    assert sequences(Documents(TokenFile(path), 5, BOS))[1:3] == [[[BOS, *b[:4]]], [b[4:8]]]


@pytest.mark.parametrize("kind", [Windows, Documents])
def test_every_token_is_in_one_row(kind: type[FileRows], tmp_path: Path) -> None:
    path = tmp_path / "c.tokens"
    draw = random.Random(5)
    documents = write(path, [draw.choice((1, 2, 5, 16, 17, 70)) for _ in range(EVERY + 300)])

    rows = kind(TokenFile(path), 16, None)
    found = [ids for row in range(len(rows)) for ids in rows[row].sequences()]

    assert np.concatenate(found).tolist() == [token for each in documents for token in each]
    assert all(EOS not in ids[:-1] and len(ids) <= 16 for ids in found)
    if kind is Documents:
        assert len(rows) == sum(-(-len(each) // 16) for each in documents)


def test_a_damaged_block_is_named_when_a_row_of_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.tokens"
    write(path, [50, 50])
    content = bytearray(path.read_bytes())
    content[4096 + 20] ^= 1
    path.write_bytes(content)

    with pytest.raises(ValueError, match=r"block 0 .* differs from its CRC-32"):
        sequences(Windows(TokenFile(path), 16, None))
