"""The corpus of the step, packed where it is not yet, in its order."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config import RowCounts
from pipeline.data.corpus.corpus import Corpus, Reading, open_corpus, open_files
from pipeline.data.corpus.paths import CorpusPath, evaluation_paths, training_paths
from pipeline.data.corpus.prepare import DIRECTORY, check_size, prepare
from pipeline.data.corpus.stream import MixedStream
from pipeline.data.store.vocabulary import vocabulary_of
from pipeline.errors import DataError, UserError
from pipeline.parallel.mesh import current_mesh
from step0_pretrain.config import PretrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rows:
    """What the step learns from, with the tokenizer of its model."""

    tokenizer: "PreTrainedTokenizerBase"
    corpus: Corpus
    total_steps: int

    @property
    def stream(self) -> MixedStream:
        """The order of the rows."""
        return self.corpus.stream

    @property
    def fingerprint(self) -> str:
        """The same for the same tokens, mixed alike, and for no others."""
        return self.corpus.fingerprint


def reading_of(config: PretrainConfig, tokenizer: "PreTrainedTokenizerBase") -> Reading:
    """How the token files are read for a model with this tokenizer.

    Raises:
        DataError: it has no fast form, or no end-of-sequence token.
    """
    vocabulary = vocabulary_of(tokenizer, str(config.model.path))
    first, *_ = tokenizer.encode("a")
    bos = first if first == tokenizer.bos_token_id else None
    return Reading(config.data, vocabulary, bos, config.output_dir / DIRECTORY)


def load_rows(config: PretrainConfig, tokenizer: "PreTrainedTokenizerBase") -> Rows:
    """Pack what is no token file yet, on the main process, and open the corpus on all.

    Raises:
        DataError: there is no corpus, or it can't be used.
    """
    config.check_corpus()
    reading = reading_of(config, tokenizer)
    world = current_mesh().world
    problem = world.gather_objects(_prepared(config, reading) if world.rank == 0 else None)[0]
    if problem is not None:
        raise DataError(problem)
    corpus = open_corpus(reading, batch_size=config.batch_size, seed=config.seed)
    return Rows(tokenizer, corpus, corpus.stream.num_steps(config.epochs, config.max_steps))


def check_paths(config: PretrainConfig) -> None:
    """Whether the data paths name what a corpus can be, and no more text than is packed here.

    Raises:
        DataError: they do not.
    """
    check_size(all_paths(config), str(config.model.path))


def all_paths(config: PretrainConfig) -> list[CorpusPath]:
    """What the data paths name, for training and for evaluation.

    Raises:
        DataError: nothing that can be a corpus.
    """
    return [*training_paths(config.data), *evaluation_paths(config.data)]


def count_rows(config: PretrainConfig, tokenizer: "PreTrainedTokenizerBase | None") -> RowCounts:
    """As `PretrainConfig.count_rows`."""
    if tokenizer is None:
        return RowCounts(unread="not known before the tokenizer is there")
    reading = reading_of(config, tokenizer)
    paths = all_paths(config)
    open_files(paths, reading)
    unpacked = [path.name for path in paths if path.kind != "tokens"]
    if unpacked:
        return RowCounts(unread=f"{' '.join(unpacked)} packed when the run begins")
    corpus = open_corpus(reading, batch_size=config.batch_size, seed=config.seed)
    held_out = corpus.chosen.rows
    return RowCounts(
        train=corpus.stream.num_rows,
        held_out=len(held_out),
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


def _prepared(config: PretrainConfig, reading: Reading) -> str | None:
    """Pack and convert; what is wrong, in a sentence that all processes are to raise."""
    try:
        prepare(all_paths(config), reading.vocabulary, reading.directory, field=config.data.field)
    except UserError as error:
        return str(error)
    return None
