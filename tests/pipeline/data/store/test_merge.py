from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.data.store.__main__ import main
from pipeline.data.store.check import findings
from pipeline.data.store.merge import merge
from pipeline.data.store.reader import TokenFile
from pipeline.errors import ConfigError, DataError
from tests.pipeline.data.store.corpus import EOS, ORIGIN, write_tokens


def test_a_merged_file_has_the_documents_of_both(tmp_path: Path) -> None:
    first, second = [[1, EOS], [2, 3, EOS]], [[4, EOS]]
    write_tokens(tmp_path / "a.tokens", first)
    write_tokens(tmp_path / "b.tokens", second, replace(ORIGIN, names=("b.jsonl",), bad_rows=2))

    merge([TokenFile(tmp_path / f"{name}.tokens") for name in "aba"], tmp_path / "c.tokens")

    file = TokenFile(tmp_path / "c.tokens")
    documents = [file.tokens(n).tolist() for n in range(file.documents)]
    assert documents == [*first, *second, *first]
    assert not list(findings(file))
    assert file.origin.names == ("a.jsonl", "b.jsonl", "a.jsonl")
    assert (file.origin.files, file.origin.bytes, file.origin.bad_rows) == (3, 30, 2)


def test_files_of_different_tokenizers_are_not_merged(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.tokens", [[1, EOS]])
    write_tokens(tmp_path / "b.tokens", [[1, EOS]], replace(ORIGIN, tokenizer_hash="00" * 32))

    with pytest.raises(DataError, match=r"b.tokens was packed with another tokenizer"):
        main(["merge", *(str(tmp_path / f"{n}.tokens") for n in "ab"), "--out", f"{tmp_path}/c"])
    with pytest.raises(ConfigError, match="already exists"):
        main(["merge", f"{tmp_path}/a.tokens", "--out", f"{tmp_path}/b.tokens"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tokens", "b.tokens"]


def test_a_damaged_block_is_not_merged(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.tokens", [[1, EOS]])
    content = bytearray((tmp_path / "a.tokens").read_bytes())
    content[4096] ^= 1
    (tmp_path / "a.tokens").write_bytes(content)

    with pytest.raises(DataError, match=r"block 0 .* differs from its CRC-32"):
        merge([TokenFile(tmp_path / "a.tokens")], tmp_path / "c.tokens")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tokens"]
