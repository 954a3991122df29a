"""Token files in another order, and in parts."""

import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.store import shuffle as module
from pipeline.data.store.__main__ import main
from pipeline.data.store.check import findings
from pipeline.data.store.documents import PART, parts_of
from pipeline.data.store.reader import TokenFile
from pipeline.data.store.shuffle import keys_of, shuffle
from pipeline.data.store.writer import TokenWriter
from pipeline.errors import ConfigError, DataError
from tests.pipeline.data.store.corpus import EOS, ORIGIN, write_tokens


def write(path: Path, count: int, *, longest: int = 20) -> list[list[int]]:
    draw = random.Random(count)
    documents = [
        [draw.randrange(EOS) for _ in range(draw.randrange(longest))] + [EOS] for _ in range(count)
    ]
    write_tokens(path, documents)
    return documents


def read(path: Path) -> list[list[int]]:
    file = TokenFile(path)
    assert not list(findings(file))
    return [file.tokens(number).tolist() for number in range(file.documents)]


@pytest.mark.parametrize("bucket_bytes", [2**24, 4000, 400])
def test_the_order_follows_from_the_seed_whatever_fits_into_memory(
    bucket_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = write(tmp_path / "a.tokens", 2000)
    monkeypatch.setattr(module, "BUCKET_BYTES", bucket_bytes)

    main(["shuffle", f"{tmp_path}/a.tokens", "--seed", "7", "--out", f"{tmp_path}/b.tokens"])

    keys = keys_of(np.arange(2000, dtype=np.uint64), 7).tolist()
    expected = [documents[number] for number in sorted(range(2000), key=lambda n: keys[n])]
    assert read(tmp_path / "b.tokens") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tokens", "b.tokens"]


def test_another_seed_is_another_order_and_no_key_is_given_twice(tmp_path: Path) -> None:
    documents = write(tmp_path / "a.tokens", 500)
    file = TokenFile(tmp_path / "a.tokens")

    for seed in (1, 2):
        shuffle(file, tmp_path / f"{seed}.tokens", seed=seed)

    first, second = (read(tmp_path / f"{seed}.tokens") for seed in (1, 2))
    assert sorted(first) == sorted(second) == sorted(documents)
    assert first != second
    assert sum(a == b for a, b in zip(first, documents, strict=True)) < 50
    assert len(set(keys_of(np.arange(10**5, dtype=np.uint64), 3).tolist())) == 10**5


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, EOS, 3_000_000)
    ids[99::100] = EOS
    with TokenWriter(tmp_path / "a.tokens", 2) as writer:
        for _ in range(8):
            writer.append(ids, np.full(30_000, 100))
        writer.finish(ORIGIN)
    file = TokenFile(tmp_path / "a.tokens")

    tracemalloc.start()
    shuffle(file, tmp_path / "b.tokens", seed=1)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert file.layout.width * file.layout.tokens > 45e6
    assert most < 150e6


def test_parts_are_disjoint_and_of_one_size(tmp_path: Path) -> None:
    documents = write(tmp_path / "a.tokens", 1000)
    out = ["--out", f"{tmp_path}/p.tokens"]

    main(["chunk", f"{tmp_path}/a.tokens", "--parts", "4", *out])

    paths = [tmp_path / f"p-{part:05}-of-00004.tokens" for part in range(4)]
    parts = [read(path) for path in paths]
    sizes = [sum(map(len, part)) for part in parts]
    assert [document for part in parts for document in part] == documents
    assert max(sizes) - min(sizes) <= 40
    alone = paths[2].read_bytes()
    paths[2].unlink()
    main(["chunk", f"{tmp_path}/a.tokens", "--parts", "4", "--part", "2", *out])
    assert paths[2].read_bytes() == alone


def test_shares_go_by_the_documents_themselves(tmp_path: Path) -> None:
    documents = write(tmp_path / "a.tokens", 1500, longest=40)
    write_tokens(tmp_path / "b.tokens", [*reversed(documents), *documents[:50]])

    for name in "ab":
        shares = ["--shares", "8,1,1", "--seed", "3", "--out", f"{tmp_path}/{name}-part.tokens"]
        main(["chunk", f"{tmp_path}/{name}.tokens", *shares])

    parts = {
        name: [read(tmp_path / f"{name}-part-{n:05}-of-00003.tokens") for n in range(3)]
        for name in "ab"
    }
    assert sorted(each for part in parts["a"] for each in part) == sorted(documents)
    assert [len(part) for part in parts["a"]] == pytest.approx([1200, 150, 150], abs=60)
    for part in range(3):
        assert {*map(tuple, parts["a"][part])} == {*map(tuple, parts["b"][part])}


def test_what_can_not_be_shuffled_or_cut_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.tokens", 3)
    a, out = str(tmp_path / "a.tokens"), ["--out", str(tmp_path / "b.tokens")]

    for words, sentence in (
        (["chunk", a, *out], "parts or shares is needed"),
        (["chunk", a, "--parts", "2", "--shares", "1,1", *out], "parts or shares is needed"),
        (["chunk", a, "--parts", "2", "--part", "2", *out], "part must be one of 0 to 1, got 2"),
        (["chunk", a, "--shares", "1,0", *out], "shares needs two numbers above 0"),
        (["shuffle", a, a, *out], "shuffle takes one file, got 2"),
        (["shuffle", a, "--out", a], "already exists"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            main(words)
    with pytest.raises(DataError, match=r"part \d+ of .*a.tokens has no documents"):
        main(["chunk", a, "--parts", "50", *out])
    content = bytearray((tmp_path / "a.tokens").read_bytes())
    content[4098] ^= 1
    (tmp_path / "a.tokens").write_bytes(content)
    with pytest.raises(DataError, match=r"block 0 .* differs from its CRC-32"):
        main(["shuffle", a, *out])
    assert [path.name for path in tmp_path.iterdir()] == ["a.tokens"]


def test_parts_have_all_documents_and_a_long_one_is_alone(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.tokens", [[1, EOS], [2] * PART + [EOS], [3, EOS], [4, EOS]])

    parts = list(parts_of(TokenFile(tmp_path / "a.tokens")))

    assert [(first, documents.lengths.tolist()) for first, documents in parts] == [
        (0, [2]),
        (1, [PART + 1]),
        (2, [2, 2]),
    ]
    assert replace(parts[2][1]).chosen(np.array([1, 0])).ids.tolist() == [4, EOS, 3, EOS]
