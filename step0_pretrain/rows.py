"""The rows of the step, in their order: its corpus, packed where it is not yet."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.data.corpus.corpus import Corpus, Reading, open_corpus
from pipeline.data.corpus.prepare import prepare
from pipeline.data.corpus.stream import MixedStream
from pipeline.errors import DataError, UserError
from pipeline.parallel.mesh import current_mesh
from step0_pretrain.config import PretrainConfig
from step0_pretrain.corpus import all_paths

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
        """A hash that is the same for the same tokens, mixed alike, and for no others."""
        return self.corpus.fingerprint

    @property
    def prompts(self) -> None:
        """Texts have none."""
        return None


def load_rows(config: PretrainConfig, tokenizer: "PreTrainedTokenizerBase") -> Rows:
    """Pack what is not a token file yet, on the main process, and open the corpus on all.

    Raises:
        DataError: there is no corpus, or it can't be used.
    """
    config.check_corpus()
    reading = config.reading(tokenizer)
    world = current_mesh().world
    problem = world.gather_objects(_prepared(reading) if world.rank == 0 else None)[0]
    if problem is not None:
        raise DataError(problem)
    corpus = open_corpus(reading, batch_size=config.batch_size, seed=config.seed)
    return Rows(tokenizer, corpus, corpus.stream.num_steps(config.epochs, config.max_steps))


def _prepared(reading: Reading) -> str | None:
    """Pack and convert; what is wrong, in a sentence that all processes are to raise."""
    data = reading.data
    try:
        prepare(all_paths(data), reading.vocabulary, reading.directory, field=data.field)
    except UserError as error:
        return str(error)
    return None
