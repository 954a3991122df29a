"""Rows of step 0: their order, their mixture, and the documents held out."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config import TextDataConfig
from pipeline.data.store.rows import MixedStream, Windows
from pipeline.data.store.token_file import TokenFile
from step0_pretrain.corpus import Corpus, Reading, open_corpus
from tests.pipeline.data.store.corpus import EOS, byte_vocabulary, write_tokens

VOCABULARY = byte_vocabulary()


def write(path: Path, lengths: list[int]) -> list[list[int]]:
    """A token file of documents of these lengths, including eos."""
    draw = random.Random(0)
    documents = [[*draw.choices(range(EOS), k=length - 1), EOS] for length in lengths]
    write_tokens(path, documents)
    return documents


def sequences(rows: Windows) -> list[list[list[int]]]:
    return [[ids.tolist() for ids in rows[row].sequences()] for row in range(len(rows))]


def test_windows_are_consecutive_and_separate_documents(tmp_path: Path) -> None:
    a, b, c = write(tmp_path / "c", [3, 9, 2])

    assert sequences(Windows(TokenFile(tmp_path / "c"), 4, None)) == [
        [a, b[:1]],
        [b[1:5]],
        [b[5:9]],
        [c],
    ]


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


def document(number: int, *, length: int = 40) -> list[int]:
    """A document that no other number has."""
    return [*number.to_bytes(4, "little"), *[number % 251] * (length - 5), EOS]


def opened(paths: Sequence[Path], *, name: str = "bytes", **settings: object) -> Corpus:
    data = TextDataConfig(**{"path": tuple(map(str, paths)), "max_length": 32, **settings})
    vocabulary = VOCABULARY if name == "bytes" else replace(VOCABULARY, hash="0" * 64, name=name)
    return open_corpus(Reading(data, vocabulary, None), batch_size=8, seed=1)


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


def test_documents_and_their_copies_are_trained_on_or_held_out(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [document(n) for n in range(300)])
    write_tokens(tmp_path / "b", [document(n) for n in range(200, 500)])

    corpus = opened([tmp_path / "a", tmp_path / "b"], eval_fraction=0.1)

    held_out, learned = evaluated(corpus), trained(corpus)
    assert not held_out & learned
    assert 25 < len(held_out) < 80
    assert len(learned) > 400
    few = opened([tmp_path / "a"], eval_fraction=1e-9)
    assert len(evaluated(few) - trained(few)) == 1


def test_a_corpus_that_grows_moves_no_document(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [document(n) for n in range(300)])
    write_tokens(tmp_path / "grown", [document(n) for n in reversed(range(600))])

    small, large = (opened([tmp_path / name]) for name in ("a", "grown"))
    other = opened([tmp_path / "a"], seed=5)

    assert evaluated(small) == {number for number in evaluated(large) if number < 300}
    assert evaluated(small) != evaluated(other)
    assert small.fingerprint != large.fingerprint
