"""What the data paths of the step name, before anything of them is packed."""

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import RowCounts, TextDataConfig
from pipeline.data.corpus.corpus import Corpus, Reading, open_corpus, open_files
from pipeline.data.corpus.paths import CorpusPath, evaluation_paths, training_paths
from pipeline.data.corpus.prepare import DIRECTORY, check_size
from pipeline.data.store.vocabulary import vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def all_paths(data: TextDataConfig) -> list[CorpusPath]:
    """All paths, for training and for evaluation.

    Raises:
        DataError: they name nothing that can be a corpus.
    """
    return [*training_paths(data), *evaluation_paths(data)]


def check_paths(data: TextDataConfig, model: str) -> None:
    """Whether the data paths name what a corpus can be, and no more text than is packed here.

    Raises:
        DataError: they do not.
    """
    check_size(all_paths(data), model)


def reading_of(
    data: TextDataConfig, tokenizer: "PreTrainedTokenizerBase", *, model: str, output_dir: Path
) -> Reading:
    """How the token files are read for a model with this tokenizer.

    Raises:
        DataError: it has no fast form, or no end-of-sequence token.
    """
    vocabulary = vocabulary_of(tokenizer, model)
    first, *_ = tokenizer.encode("a")
    bos = first if first == tokenizer.bos_token_id else None
    return Reading(data, vocabulary, bos, output_dir / DIRECTORY)


def count_rows(reading: Reading, *, batch_size: int, seed: int) -> RowCounts:
    """The rows of a run, as far as they are known before it; nothing is packed.

    Raises:
        DataError: a file can't be used, or is not of the tokenizer.
    """
    paths = all_paths(reading.data)
    open_files(paths, reading)
    unpacked = [path.name for path in paths if path.kind != "tokens"]
    if unpacked:
        return RowCounts(unread=f"{' '.join(unpacked)} packed when the run begins")
    corpus = open_corpus(reading, batch_size=batch_size, seed=seed)
    return RowCounts(
        train=corpus.stream.num_rows,
        held_out=len(corpus.chosen.rows),
        tokens=_mean_length(corpus),
        notes=tuple(corpus.notes),
    )


def _mean_length(corpus: Corpus) -> float:
    """Tokens of a row."""
    total = sum(corpus.stream.weights)
    return sum(
        weight / total * rows.file.layout.tokens / len(rows)
        for rows, weight in zip(corpus.files, corpus.stream.weights, strict=True)
    )
