"""What step 1 learns from, in its order: rows of text, or dialogues that are packed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from pipeline import offline
from pipeline.data.batches import RowStream
from pipeline.data.chat_format import ChatFormat
from pipeline.data.examples import Example
from pipeline.data.packed import PackedData, PackedDialogue, load_packed
from pipeline.data.prompt_record import PromptRecord
from pipeline.data.step_rows import known_prompts
from pipeline.models.chat import load_chat
from step1_sft.config import SFTConfig

Demonstration: TypeAlias = Example | PackedDialogue


@dataclass(frozen=True)
class Demonstrations:
    """The demonstrations, and the order in which the step learns from them."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    data: offline.Learned[Demonstration]

    prompts: PromptRecord
    """What this step and the earlier ones train on and hold out."""

    fingerprint: str
    """The same for the same training rows, and for no others."""

    stream: RowStream
    """Row numbers of `data.train`, a global batch at a time."""

    total_steps: int
    """Optimizer steps of the run."""

    def next_rows(self) -> Sequence[Demonstration]:
        """The rows of the next global batch."""
        if isinstance(self.data, PackedData):
            self.data.train.release()
        return [self.data.train[row] for row in next(self.stream)]


def load_rows(config: SFTConfig) -> Demonstrations:
    """Read the rows, or the records of those that are packed, and the model's tokenizer.

    Raises:
        DataError: as `pipeline.data.step_rows.load_step_rows` and `load_packed`.
        ModelError, ConfigError: as `pipeline.models.chat.load_chat`.
    """
    if not config.reads_packed:
        rows = offline.load_rows(config, config.model, step=1)
        texts = rows.data, rows.prompts, rows.fingerprint
        return Demonstrations(rows.tokenizer, rows.chat, *texts, rows.stream, rows.total_steps)
    tokenizer, chat = load_chat(config.model, config.data)
    data = load_packed(config.data, chat, str(config.model.path), earlier=known_prompts(config))
    stream = RowStream(num_rows=len(data.train), batch_size=config.batch_size, seed=config.seed)
    steps = stream.num_steps(config.epochs, config.max_steps)
    return Demonstrations(tokenizer, chat, data, data.prompts, data.fingerprint, stream, steps)
