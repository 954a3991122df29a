"""Demonstrations as token ids and loss masks, in micro-batches."""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.data.batches import TokenBatch, collate_or_empty
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.data.lengths import FitCheck, RowFit
from pipeline.parallel.device import local_device
from pipeline.run.training import shard_rows
from step1_sft.config import SFTConfig
from step1_sft.distillation import encode_distilled


def encode(rows: Sequence[Example], chat: ChatFormat, config: SFTConfig) -> list[Encoded]:
    """Return token ids and loss masks; rows longer than `max_length` are truncated at the end."""
    return [
        encode_distilled(row, row.teacher, chat).head(config.data.max_length)
        if row.teacher is not None
        else chat.encode(row.prompt, row.chosen, config.data.train_on, origin=row.origin).head(
            config.data.max_length
        )
        for row in rows
    ]


def make_fit_check(chat: ChatFormat, config: SFTConfig) -> FitCheck[Example]:
    """Return a check of which rows are truncated and how many trained tokens each row keeps."""
    limit = config.data.max_length

    def fit(rows: Sequence[Example]) -> list[RowFit]:
        full = encode(rows, chat, replace(config, data=replace(config.data, max_length=2**31)))
        return [RowFit(len(row) > limit, row.head(limit).num_targets) for row in full]

    return FitCheck(fit, lost_side="end", empty="have nothing left to train on")


def split_rows(rows: Sequence[Encoded], config: SFTConfig) -> list[TokenBatch]:
    """Return this process's micro-batches of the rows."""
    parts = shard_rows([len(row) for row in rows], config, config.model)
    return [
        collate_or_empty([rows[row] for row in part], filler=rows[0]).to(local_device())
        for part in parts
    ]
