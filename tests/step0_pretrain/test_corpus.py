"""Rows of step 0: order, mixture and held-out documents."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config import TextDataConfig
from pipeline.data.store.rows import MixedStream, Windows
from pipeline.data.store.token_file import TokenFile
from step0_pretrain.corpus import Corpus, CorpusSettings, open_corpus
from tests.pipeline.data.store.corpus import EOS, byte_vocabulary, write_tokens

VOCABULARY = byte_vocabulary()


def write_documents(path: Path, lengths: list[int]) -> list[list[int]]:
    """Write a token file of documents of these lengths, including eos."""
    draw = random.Random(0)
    documents = [[*draw.choices(range(EOS), k=length - 1), EOS] for length in lengths]
    write_tokens(path, documents)
    return documents


def sequences(windows: Windows) -> list[list[list[int]]]:
    return [[ids.tolist() for ids in windows[row].sequences()] for row in range(len(windows))]


def test_windows_are_consecutive_and_split_at_documents(tmp_path: Path) -> None:
    a, b, c = write_documents(tmp_path / "c", [3, 9, 2])

    assert sequences(Windows(TokenFile(tmp_path / "c"), 4, None)) == [
        [a, b[:1]],
        [b[1:5]],
        [b[5:9]],
        [c],
    ]


def test_rows_with_bos_have_max_length_tokens(tmp_path: Path) -> None:
    a, b, c, d = write_documents(tmp_path / "c", [1, 1, 4, 1])
    windows = Windows(TokenFile(tmp_path / "c"), 5, bos := EOS + 1)

    assert sequences(windows) == [[[bos, *a], [bos, *b]], [c], [d]]
    assert [len(row) for row in windows.fill_with([2, 0, 2])] == [5, 5, 2]


def take_rows(stream: MixedStream, count: int) -> list[tuple[int, int]]:
    return [row for _ in range(count // stream.batch_size) for row in next(stream)]


def test_batches_keep_the_mixture_and_pass_ends_with_shortest_file() -> None:
    stream = MixedStream([60, 1000], [3.0, 1.0], batch_size=4, seed=1)

    first, later = take_rows(stream, 80), take_rows(stream, 80)

    assert stream.num_rows == 80  # 60 of the first file, a third of that of the other
    assert all([file for file, _ in first[i : i + 4]].count(0) == 3 for i in range(0, 80, 4))
    for part in (first, later):
        assert sorted(row for file, row in part if file == 0) == list(range(60))
    assert len({row for file, row in first + later if file == 1}) == 40
    assert [row for file, row in first if file == 0] != [row for file, row in later if file == 0]


def document(number: int, *, length: int = 40) -> list[int]:
    """Return a document that is unique to its number."""
    return [*number.to_bytes(4, "little"), *[number % 251] * (length - 5), EOS]


def open_test_corpus(paths: Sequence[Path], *, name: str = "bytes", **settings: object) -> Corpus:
    data = TextDataConfig(**{"path": tuple(map(str, paths)), "max_length": 32, **settings})
    vocabulary = VOCABULARY if name == "bytes" else replace(VOCABULARY, hash="0" * 64, name=name)
    return open_corpus(CorpusSettings(data, vocabulary, None), batch_size=8, seed=1)


def eval_documents(corpus: Corpus) -> set[int]:
    """Return the numbers of the documents whose beginning is in the evaluation rows."""
    return {
        int.from_bytes(bytes(ids[:4].tolist()), "little")
        for row in corpus.eval_rows
        for span, ids in zip(row.spans, row.sequences(), strict=True)
        if span.is_first
    }


def train_documents(corpus: Corpus) -> set[int]:
    """Return the numbers of the documents whose beginning is in one pass of the training rows."""
    numbers: set[int] = set()
    for _ in range(corpus.stream.num_steps(1, None)):
        for row in corpus.next_rows():
            kept = row.without(corpus.held_out.contains)
            for span, ids in zip(kept.spans, kept.sequences(), strict=True):
                if span.is_first and len(ids) >= 4:
                    numbers.add(int.from_bytes(bytes(ids[:4].tolist()), "little"))
    return numbers


def test_document_and_its_copies_are_all_trained_on_or_all_held_out(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [document(n) for n in range(300)])
    write_tokens(tmp_path / "b", [document(n) for n in range(200, 500)])

    corpus = open_test_corpus([tmp_path / "a", tmp_path / "b"], eval_fraction=0.1)

    held_out, trained = eval_documents(corpus), train_documents(corpus)
    assert not held_out & trained
    assert 25 < len(held_out) < 80
    assert len(trained) > 400
    few = open_test_corpus([tmp_path / "a"], eval_fraction=1e-9)
    assert len(eval_documents(few) - train_documents(few)) == 1


def test_growing_corpus_keeps_its_held_out_documents(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [document(n) for n in range(300)])
    write_tokens(tmp_path / "grown", [document(n) for n in reversed(range(600))])

    small, large = (open_test_corpus([tmp_path / name]) for name in ("a", "grown"))
    other = open_test_corpus([tmp_path / "a"], seed=5)

    assert eval_documents(small) == {number for number in eval_documents(large) if number < 300}
    assert eval_documents(small) != eval_documents(other)
    assert small.fingerprint != large.fingerprint
