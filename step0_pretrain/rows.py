"""Rows of the step, packed on the main process if they are still texts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.data.store.corpus import Corpus, Reading, open_corpus, prepare
from pipeline.data.store.order import MixedStream
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import DataError, UserError
from step0_pretrain.config import PretrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rows:
    """The corpus, with the tokenizer of the model."""

    tokenizer: "PreTrainedTokenizerBase"
    corpus: Corpus
    total_steps: int

    @property
    def stream(self) -> MixedStream:
        """Order of the rows."""
        return self.corpus.stream

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens and their mixture."""
        return self.corpus.fingerprint

    @property
    def prompts(self) -> None:
        """None: texts have no prompts."""
        return None


def load_rows(config: PretrainConfig, tokenizer: "PreTrainedTokenizerBase") -> Rows:
    """Pack texts on the main process, and open the corpus on all.

    Raises:
        DataError: there is no corpus, or it can't be used.
    """
    config.check_corpus()
    reading = config.reading(tokenizer)
    world = current_mesh().world
    error = world.gather_objects(_prepare(reading) if world.rank == 0 else None)[0]
    if error is not None:
        raise DataError(error)
    corpus = open_corpus(reading, batch_size=config.batch_size, seed=config.seed)
    return Rows(tokenizer, corpus, corpus.stream.num_steps(config.epochs, config.max_steps))


def _prepare(reading: Reading) -> str | None:
    """Pack texts; return the error message, which all processes raise."""
    try:
        prepare(reading)
    except UserError as error:
        return str(error)
    return None
