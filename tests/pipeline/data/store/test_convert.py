import os
import pickle
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.store.__main__ import main
from pipeline.data.store.check import findings
from pipeline.data.store.convert import read_documents, to_tokens
from pipeline.data.store.modalities import read_pairs
from pipeline.data.store.reader import TokenFile
from pipeline.errors import ConfigError, DataError
from tests.pipeline.data.store.corpus import EOS, ORIGIN, byte_vocabulary, write_tokens

DOCUMENTS = [[1, 2, EOS], [EOS], [250, 7, 7, 7, EOS]]


def documents_of(path: Path) -> list[list[int]]:
    file = TokenFile(path)
    assert not list(findings(file))
    return [file.tokens(n).tolist() for n in range(file.documents)]


def packed(documents: list[list[int]], width: int, *, protocol: int = 4) -> bytes:
    """A .pbin by its description, with Python's pickle."""
    data, index = b"", []
    for document in documents:
        content = np.array(document, f"<u{width}").tobytes()
        index.append((len(data), len(content)))
        data += content
    return struct.pack("<QI", len(data), width) + data + pickle.dumps(index, protocol)


def test_megatrons_files_have_the_documented_bytes_and_are_read_back(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.tokens", DOCUMENTS)

    main(["convert", f"{tmp_path}/a.tokens", "--to", "megatron", "--out", f"{tmp_path}/m"])

    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    index += struct.pack("<3i", 3, 1, 5) + struct.pack("<3q", 0, 6, 8)
    assert (tmp_path / "m.idx").read_bytes() == index + struct.pack("<4q", 0, 1, 2, 3)
    tokens = [token for document in DOCUMENTS for token in document]
    assert (tmp_path / "m.bin").read_bytes() == struct.pack("<9H", *tokens)
    for name in ("m.idx", "m.bin"):
        to_tokens(tmp_path / name, byte_vocabulary(), tmp_path / f"{name}.tokens")
        assert documents_of(tmp_path / f"{name}.tokens") == DOCUMENTS
    with pytest.raises(ConfigError, match=r"m.bin already exists"):
        main(["convert", f"{tmp_path}/a.tokens", "--to", "megatron", "--out", f"{tmp_path}/m"])


def test_a_large_vocabulary_goes_to_megatron_in_four_bytes(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.tokens", [[65499, EOS]], replace(ORIGIN, vocabulary=65500))

    main(["convert", f"{tmp_path}/a.tokens", "--to", "megatron", "--out", f"{tmp_path}/m"])

    assert (tmp_path / "m.bin").read_bytes() == struct.pack("<2i", 65499, EOS)
    assert (tmp_path / "m.idx").read_bytes()[17] == 4


def test_megatrons_documents_of_several_sequences_without_eos_are_joined(tmp_path: Path) -> None:
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 3)
    index += (
        struct.pack("<3i", 2, 1, 1) + struct.pack("<3q", 4, 0, 12) + struct.pack("<3q", 0, 2, 3)
    )
    (tmp_path / "m.idx").write_bytes(index)
    (tmp_path / "m.bin").write_bytes(struct.pack("<4i", 9, 5, 6, EOS))

    to_tokens(tmp_path / "m.idx", byte_vocabulary(), tmp_path / "x.tokens")

    assert documents_of(tmp_path / "x.tokens") == [[5, 6, 9, EOS], [EOS]]
    (tmp_path / "m.bin").write_bytes(struct.pack("<3i", 9, 5, 6))
    with pytest.raises(DataError, match=r"names tokens that its \.bin does not have"):
        to_tokens(tmp_path / "m.idx", byte_vocabulary(), tmp_path / "y.tokens")
    (tmp_path / "m.idx").write_bytes(index[:-1])
    with pytest.raises(DataError, match="was not copied whole"):
        to_tokens(tmp_path / "m.idx", byte_vocabulary(), tmp_path / "y.tokens")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("width", [2, 4])
def test_modalities_files_are_read(tmp_path: Path, width: int, protocol: int) -> None:
    documents = [[n % 256] * (n % 70) + [EOS] for n in range(2500)]  # several batches of APPENDS
    (tmp_path / "a.pbin").write_bytes(packed(documents, width, protocol=protocol))

    to_tokens(tmp_path / "a.pbin", byte_vocabulary(), tmp_path / "x.tokens")

    assert documents_of(tmp_path / "x.tokens") == documents


def test_pairs_are_read_as_pickle_reads_them() -> None:
    pairs = [(0, 255), (256, 65535), (65536, 2**31 - 1), (2**31, 2**40), (2**62, 1)]

    assert list(read_pairs(Path("a"), memoryview(pickle.dumps(pairs)))) == pairs
    assert not list(read_pairs(Path("a"), memoryview(pickle.dumps([]))))


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_malicious_index_executes_nothing(tmp_path: Path) -> None:
    for content in (Bomb(tmp_path / "ran"), [(0, 2), Bomb(tmp_path / "ran")]):
        data = struct.pack("<QIH", 2, 2, EOS) + pickle.dumps(content)
        (tmp_path / "a.pbin").write_bytes(data)

        with pytest.raises(DataError, match=r"has the opcode SHORT_BINUNICODE in its index"):
            to_tokens(tmp_path / "a.pbin", byte_vocabulary(), tmp_path / "x.tokens")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pbin"]


def test_every_cut_and_every_changed_opcode_ends_in_a_sentence(tmp_path: Path) -> None:
    whole = packed(DOCUMENTS, 2)
    path = tmp_path / "a.pbin"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError):
            list(read_documents(path))
    index = whole[12 + 18 :]
    for position in range(len(index)):
        for value in range(256):
            changed = bytearray(index)
            changed[position] = value
            with suppress(DataError):
                list(read_pairs(path, memoryview(changed)))


def test_what_can_not_be_converted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pbin").write_bytes(packed([[1, 60000]], 2))

    with pytest.raises(DataError, match="document 0 has ids that bytes does not have"):
        to_tokens(tmp_path / "a.pbin", byte_vocabulary(), tmp_path / "x.tokens")
    (tmp_path / "empty.pbin").write_bytes(packed([], 2))
    with pytest.raises(DataError, match=r"empty.pbin has no documents"):
        to_tokens(tmp_path / "empty.pbin", byte_vocabulary(), tmp_path / "x.tokens")
    (tmp_path / "empty.pbin").unlink()
    with pytest.raises(DataError, match=r"a.npy is of no known format"):
        to_tokens(tmp_path / "a.npy", byte_vocabulary(), tmp_path / "x.tokens")
    with pytest.raises(DataError, match=r"none.idx can't be read: No such file"):
        to_tokens(tmp_path / "none.idx", byte_vocabulary(), tmp_path / "x.tokens")
    with pytest.raises(ConfigError, match="--tokenizer is needed with --to tokens"):
        main(["convert", f"{tmp_path}/a.pbin", "--out", f"{tmp_path}/x.tokens"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.pbin"]
