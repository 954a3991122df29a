"""Rows of token files as micro-batches."""

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.data.batches import TokenBatch
from pipeline.data.store.rows import TokenRow
from pipeline.parallel.device import local_device
from pipeline.run.training import local_parts
from step0_pretrain.config import PretrainConfig


def cut(rows: Sequence[TokenRow], config: PretrainConfig) -> list[list[TokenRow]]:
    """This process's micro-batches of the rows; some may be empty."""
    parts = local_parts(
        [len(row) for row in rows],
        config,
        max_tokens=config.micro_batch_size * config.data.max_length,
        deterministic=config.model.zero.reduction == "deterministic",
    )
    return [[rows[row] for row in part] for part in parts]


def collate(rows: Sequence[TokenRow], *, spare: TokenRow) -> TokenBatch:
    """Concatenate the sequences of the rows; without any, those of `spare` without targets."""
    learned = [row for row in rows if row.spans]
    used = learned or [spare]
    sequences = [ids for row in used for ids in row.sequences()]
    lengths = tuple(map(len, sequences))
    input_ids = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
    is_target = torch.ones(len(input_ids), dtype=torch.bool)
    is_target[torch.tensor((0, *lengths[:-1])).cumsum(0)] = False
    targets = is_target.nonzero().squeeze(-1) if learned else torch.empty(0, dtype=torch.long)
    return TokenBatch(input_ids, lengths, targets).to(local_device())
