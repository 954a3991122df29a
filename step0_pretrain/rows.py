"""Rows of the step, and their micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.data.batches import TokenBatch
from pipeline.data.store.rows import MixedStream, TokenRow
from pipeline.parallel.device import local_device
from pipeline.run.training import shard_rows
from step0_pretrain.config import PretrainConfig
from step0_pretrain.corpus import Corpus, CorpusSettings, open_corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rows:
    """The corpus, and the model's tokenizer."""

    tokenizer: "PreTrainedTokenizerBase"
    corpus: Corpus
    total_steps: int
    prompts: None = None
    """Always None, since text has no prompts."""

    @property
    def stream(self) -> MixedStream:
        """Stream of the rows, in training order."""
        return self.corpus.stream

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens and their mixture."""
        return self.corpus.fingerprint


def load_rows(config: PretrainConfig, tokenizer: "PreTrainedTokenizerBase") -> Rows:
    """Open the corpus.

    Raises:
        DataError: there is no corpus, or it can't be used.
    """
    config.check_corpus()
    settings = CorpusSettings.for_model(config.data, tokenizer, model=str(config.model.path))
    corpus = open_corpus(settings, batch_size=config.batch_size, seed=config.seed)
    return Rows(tokenizer, corpus, corpus.stream.num_steps(config.epochs, config.max_steps))


def split_rows(rows: Sequence[TokenRow], config: PretrainConfig) -> list[list[TokenRow]]:
    """Return this process's micro-batches of the rows; some may be empty."""
    parts = shard_rows([len(row) for row in rows], config, config.model)
    return [[rows[row] for row in part] for part in parts]


def collate(rows: Sequence[TokenRow], *, spare: TokenRow) -> TokenBatch:
    """Concatenate the rows' sequences; if all are empty, use those of `spare` without targets."""
    with_targets = [row for row in rows if row.spans]
    present = with_targets or [spare]
    sequences = [ids for row in present for ids in row.sequences()]
    lengths = tuple(map(len, sequences))
    input_ids = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
    is_target = torch.ones(len(input_ids), dtype=torch.bool)
    is_target[torch.tensor((0, *lengths[:-1])).cumsum(0)] = False
    targets = is_target.nonzero().squeeze(-1) if with_targets else torch.empty(0, dtype=torch.long)
    return TokenBatch(input_ids, lengths, targets).to(local_device())
