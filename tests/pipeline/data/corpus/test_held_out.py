"""What is held out: whole documents, by their own tokens, never trained on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import TextDataConfig
from pipeline.data.corpus.corpus import Corpus, Reading, open_corpus
from pipeline.data.store.vocabulary import Vocabulary
from pipeline.errors import DataError
from tests.pipeline.data.store.corpus import EOS, ORIGIN, byte_vocabulary, write_tokens

VOCABULARY = replace(byte_vocabulary(), hash=ORIGIN.tokenizer_hash)


def document(number: int, *, length: int = 40) -> list[int]:
    """A document that no other number has."""
    return [*number.to_bytes(4, "little"), *[number % 251] * (length - 5), EOS]


def opened(
    paths: Sequence[Path], *, vocabulary: Vocabulary = VOCABULARY, **settings: object
) -> Corpus:
    data = TextDataConfig(**{"path": tuple(map(str, paths)), "max_length": 32, **settings})  # pyright: ignore[reportArgumentType]
    reading = Reading(data, vocabulary, None, Path("nowhere"))
    return open_corpus(reading, batch_size=8, seed=1)


def evaluated(corpus: Corpus) -> set[int]:
    """The numbers of the documents that evaluation reads from their beginning."""
    return {
        int.from_bytes(bytes(ids[:4].tolist()), "little")
        for row in corpus.chosen.rows
        for span, ids in zip(row.spans, row.sequences(), strict=True)
        if span.is_first
    }


def trained(corpus: Corpus) -> set[int]:
    """Those that training reads from their beginning, in one pass."""
    found: set[int] = set()
    for _ in range(corpus.stream.num_steps(1, None)):
        for row in corpus.next_rows():
            kept = row.without(corpus.chosen.held_out.contains)
            for span, ids in zip(kept.spans, kept.sequences(), strict=True):
                if span.is_first and len(ids) >= 4:
                    found.add(int.from_bytes(bytes(ids[:4].tolist()), "little"))
    return found


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_documents_are_trained_on_or_held_out_and_copies_with_them(
    packing: str, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "a.tokens", [document(n) for n in range(300)])
    write_tokens(tmp_path / "b.tokens", [document(n) for n in range(200, 500)])

    corpus = opened(
        [tmp_path / "a.tokens", tmp_path / "b.tokens"], packing=packing, eval_fraction=0.1
    )

    held_out, learned = evaluated(corpus), trained(corpus)
    assert not held_out & learned
    assert 25 < len(held_out) < 80
    assert len(learned) > 400  # a beginning of less than four tokens has no number here


def test_a_corpus_that_grows_or_lies_in_other_files_moves_no_document(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.tokens", [document(n) for n in range(300)])
    write_tokens(tmp_path / "grown.tokens", [document(n) for n in reversed(range(600))])

    small, large = (opened([tmp_path / f"{name}.tokens"]) for name in ("a", "grown"))
    other = opened([tmp_path / "a.tokens"], seed=5)

    assert evaluated(small) == {number for number in evaluated(large) if number < 300}
    assert evaluated(small) != evaluated(other)


def test_documents_of_an_evaluation_file_are_not_trained_on(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.tokens", [document(n) for n in range(100)])
    write_tokens(tmp_path / "test.tokens", [document(n) for n in range(90, 120)])

    corpus = opened([tmp_path / "a.tokens"], eval_path=(str(tmp_path / "test.tokens"),))

    assert evaluated(corpus) <= set(range(90, 120))
    assert not trained(corpus) & set(range(90, 100))
    assert len(trained(corpus)) > 75
    assert sum(map(len, corpus.chosen.rows)) == 30 * 40


def test_of_few_documents_one_is_held_out_and_of_one_none_can_be(tmp_path: Path) -> None:
    write_tokens(tmp_path / "few.tokens", [document(n) for n in range(3)])
    write_tokens(tmp_path / "one.tokens", [document(1, length=400), document(1, length=400)])

    assert len(evaluated(opened([tmp_path / "few.tokens"]))) == 1
    with pytest.raises(DataError, match=r"one.tokens: all documents would be held out"):
        opened([tmp_path / "one.tokens"])


def test_what_is_read_gives_its_memory_back(tmp_path: Path) -> None:
    write_tokens(tmp_path / "large.tokens", [document(n, length=30_000) for n in range(1500)])
    corpus = opened([tmp_path / "large.tokens"], max_length=2048, max_eval_rows=4)

    def resident() -> int:
        corpus.next_rows()  # gives back what the batch before it read
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    before = resident()
    read = 0
    for _ in range(300):
        for row in corpus.next_rows():
            read += sum(int(ids.astype(np.int64).sum()) for ids in row.sequences())

    assert read > 0
    assert resident() - before < 25e6  # of a file of 90 MB, whose pages were read all over


def test_another_tokenizer_is_refused_and_so_is_what_is_no_corpus(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.tokens", [document(n) for n in range(10)])
    (tmp_path / "a.csv").write_text("x")
    other = replace(VOCABULARY, hash="0" * 64, name="other")

    for paths, sentence in (
        ([tmp_path], "is a directory; name its files"),
        ([tmp_path / "a.csv"], "is not a corpus; give token files"),
        ([tmp_path / "b.tokens"], "there is no such file"),
        ([tmp_path / "a.*"], "is not a corpus"),
        ([], "data.path names no corpus"),
    ):
        with pytest.raises(DataError, match=sentence):
            opened(paths)
    with pytest.raises(DataError, match="was packed with the tokenizer bytes, and other has ano"):
        opened([tmp_path / "a.tokens"], vocabulary=other)
    (tmp_path / "cut.tokens").write_bytes((tmp_path / "a.tokens").read_bytes()[:-100])
    with pytest.raises(DataError, match="was not copied whole"):
        opened([tmp_path / "cut.tokens"])
