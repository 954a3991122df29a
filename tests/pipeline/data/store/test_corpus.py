"""Rows of step 0: their order, their mixture, and the documents held out."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import TextDataConfig
from pipeline.data.store.corpus import Corpus, Reading, open_corpus
from pipeline.data.store.order import MixedStream, Permutation
from pipeline.data.store.rows import EVERY, Documents, FileRows, Windows
from pipeline.data.store.token_file import TokenFile
from pipeline.errors import DataError
from tests.pipeline.data.store.corpus import EOS, byte_vocabulary, write_tokens

BOS = 257
VOCABULARY = byte_vocabulary()


def write(path: Path, lengths: list[int]) -> list[list[int]]:
    """A token file of documents of these lengths, including eos."""
    draw = random.Random(0)
    documents = [[*draw.choices(range(EOS), k=length - 1), EOS] for length in lengths]
    write_tokens(path, documents)
    return documents


def sequences(rows: FileRows) -> list[list[list[int]]]:
    return [[ids.tolist() for ids in rows[row].sequences()] for row in range(len(rows))]


def test_windows_are_consecutive_and_separate_documents(tmp_path: Path) -> None:
    a, b, c = write(tmp_path / "c", [3, 9, 2])

    assert sequences(Windows(TokenFile(tmp_path / "c"), 4, None)) == [
        [a, b[:1]],
        [b[1:5]],
        [b[5:9]],
        [c],
    ]


def test_bos_precedes_documents_and_no_sequence_is_longer_than_a_row(tmp_path: Path) -> None:
    a, b, c = write(tmp_path / "c", [3, 9, 2])

    rows = Windows(TokenFile(tmp_path / "c"), 5, BOS)

    assert sequences(rows) == [[[BOS, *a], [BOS, *b[:1]]], [b[1:5]], [b[5:9]], [[BOS, *c]]]
    assert [len(rows[row]) for row in range(4)] == [6, 4, 4, 3]
    assert [rows[row].num_targets for row in range(4)] == [4, 3, 3, 2]
    documents = Documents(TokenFile(tmp_path / "c"), 5, BOS)
    assert sequences(documents)[1:3] == [[[BOS, *b[:4]]], [b[4:8]]]


@pytest.mark.parametrize("kind", [Windows, Documents])
def test_every_token_is_in_one_row(kind: type[FileRows], tmp_path: Path) -> None:
    draw = random.Random(5)
    lengths = [draw.choice((1, 2, 5, 16, 17, 70)) for _ in range(EVERY + 300)]
    documents = write(tmp_path / "c", lengths)

    rows = kind(TokenFile(tmp_path / "c"), 16, None)
    found = [ids for row in range(len(rows)) for ids in rows[row].sequences()]

    assert np.concatenate(found).tolist() == [token for each in documents for token in each]
    assert all(EOS not in ids[:-1] and len(ids) <= 16 for ids in found)


def test_a_permutation_has_each_number_once() -> None:
    for size in (*range(1, 70), 1024, 1025):
        order = Permutation(size, "a")
        assert sorted(order[position] for position in range(size)) == list(range(size)), size
    large = Permutation(10**11, "a")
    found = {large[position] for position in range(5000)}
    assert len(found) == 5000
    assert sum(number < 10**11 // 2 for number in found) == pytest.approx(2500, abs=200)
    numbers, other = ([Permutation(1000, key)[n] for n in range(1000)] for key in "ab")
    assert sum(a == b for a, b in zip(numbers, other, strict=True)) < 10


def rows(stream: MixedStream, count: int) -> list[tuple[int, int]]:
    return [row for _ in range(count // stream.batch_size) for row in next(stream)]


def test_every_stretch_has_the_mixture_and_a_pass_ends_with_the_shortest_file() -> None:
    stream = MixedStream([60, 1000], [3.0, 1.0], batch_size=4, seed=1)

    taken, later = rows(stream, 80), rows(stream, 80)

    assert stream.num_rows == 80  # 60 of the first, a third of as many of the other
    assert all([file for file, _ in taken[at : at + 4]].count(0) == 3 for at in range(0, 80, 4))
    for part in (taken, later):
        assert sorted(row for file, row in part if file == 0) == list(range(60))
    assert len({row for file, row in taken + later if file == 1}) == 40
    assert [row for file, row in taken if file == 0] != [row for file, row in later if file == 0]


def test_without_weights_a_pass_has_every_row_once_and_resumes_anywhere() -> None:
    stream = MixedStream([7, 20, 3], [7.0, 20.0, 3.0], batch_size=5, seed=0)

    taken = rows(stream, 10)
    resumed = MixedStream([7, 20, 3], [7.0, 20.0, 3.0], batch_size=5, seed=0)
    resumed.load_state_dict(stream.state_dict())
    rest = rows(stream, 20)

    assert rows(resumed, 20) == rest
    assert sorted(taken + rest) == [(f, row) for f, n in enumerate((7, 20, 3)) for row in range(n)]
    assert (stream.num_steps(1.5, None), stream.num_steps(1.5, 4)) == (9, 4)


def document(number: int, *, length: int = 40) -> list[int]:
    """A document that no other number has."""
    return [*number.to_bytes(4, "little"), *[number % 251] * (length - 5), EOS]


def opened(paths: Sequence[Path], *, name: str = "bytes", **settings: object) -> Corpus:
    data = TextDataConfig(**{"path": tuple(map(str, paths)), "max_length": 32, **settings})  # pyright: ignore[reportArgumentType]
    vocabulary = VOCABULARY if name == "bytes" else replace(VOCABULARY, hash="0" * 64, name=name)
    return open_corpus(Reading(data, vocabulary, None, Path("nowhere")), batch_size=8, seed=1)


def evaluated(corpus: Corpus) -> set[int]:
    """Numbers of the documents that evaluation reads from their beginning."""
    return {
        int.from_bytes(bytes(ids[:4].tolist()), "little")
        for row in corpus.eval_rows
        for span, ids in zip(row.spans, row.sequences(), strict=True)
        if span.is_first
    }


def trained(corpus: Corpus) -> set[int]:
    """Numbers of the documents that one pass of training reads from their beginning."""
    found: set[int] = set()
    for _ in range(corpus.stream.num_steps(1, None)):
        for row in corpus.next_rows():
            kept = row.without(corpus.held_out.contains)
            for span, ids in zip(kept.spans, kept.sequences(), strict=True):
                if span.is_first and len(ids) >= 4:
                    found.add(int.from_bytes(bytes(ids[:4].tolist()), "little"))
    return found


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_documents_and_their_copies_are_trained_on_or_held_out(
    packing: str, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "a", [document(n) for n in range(300)])
    write_tokens(tmp_path / "b", [document(n) for n in range(200, 500)])

    corpus = opened([tmp_path / "a", tmp_path / "b"], packing=packing, eval_fraction=0.1)

    held_out, learned = evaluated(corpus), trained(corpus)
    assert not held_out & learned
    assert 25 < len(held_out) < 80
    assert len(learned) > 400


def test_a_corpus_that_grows_moves_no_document(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [document(n) for n in range(300)])
    write_tokens(tmp_path / "grown", [document(n) for n in reversed(range(600))])

    small, large = (opened([tmp_path / name]) for name in ("a", "grown"))
    other = opened([tmp_path / "a"], seed=5)

    assert evaluated(small) == {number for number in evaluated(large) if number < 300}
    assert evaluated(small) != evaluated(other)
    assert small.fingerprint != large.fingerprint


def test_documents_of_an_evaluation_file_are_not_trained_on(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [document(n) for n in range(100)])
    write_tokens(tmp_path / "test", [document(n) for n in range(90, 120)])

    corpus = opened([tmp_path / "a"], eval_path=(str(tmp_path / "test.bin"),))

    assert evaluated(corpus) <= set(range(90, 120))
    assert not trained(corpus) & set(range(90, 100))
    assert len(trained(corpus)) > 75
    assert sum(map(len, corpus.eval_rows)) == 30 * 40


def test_one_of_few_documents_is_held_out(tmp_path: Path) -> None:
    write_tokens(tmp_path / "few", [document(n) for n in range(3)])
    write_tokens(tmp_path / "one", [document(1, length=400), document(1, length=400)])

    assert len(evaluated(opened([tmp_path / "few"]))) == 1
    with pytest.raises(DataError, match="all documents would be held out"):
        opened([tmp_path / "one"])


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    write_tokens(tmp_path / "large", [document(n, length=30_000) for n in range(800)])
    corpus = opened([tmp_path / "large"], max_length=2048, max_eval_rows=4)

    def resident() -> int:
        corpus.next_rows()  # releases what the batch before it read
        return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

    before = resident()
    for _ in range(150):
        for row in corpus.next_rows():
            assert all(len(ids) for ids in row.sequences())
    assert resident() - before < 20e6  # of a file of 48 MB, most of which was read


def test_wrong_corpora_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [document(n) for n in range(10)])
    write_tokens(tmp_path / "b", [[1, 2, 400], [3, EOS]], origin=None)
    (tmp_path / "a.csv").write_text("x")

    for paths, sentence in (
        ([tmp_path], "is a directory; name its files"),
        ([tmp_path / "a.csv"], "is not a corpus; give"),
        ([tmp_path / "c.tokens"], "there is no such file"),
        ([], "data.path names no corpus"),
        ([tmp_path / "b"], "has ids that the tokenizer bytes does not have"),
    ):
        with pytest.raises(DataError, match=sentence):
            opened(paths)
    with pytest.raises(DataError, match="was packed with the tokenizer bytes, and other has ano"):
        opened([tmp_path / "a"], name="other")
