"""Vocabulary-parallel embeddings and output layers: each process has a range of the rows.

A process looks up the rows in its range, with zeros for other tokens; the sum over processes is the
embedding. An output layer computes the logits of its range. `Policy` computes log-probabilities
from these without gathering them; calling the layer directly gathers the logits.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.kernels.logprobs import VocabularyShard, output_layer
from pipeline.parallel.group import Group
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.parallel.tensor import copy_to_group, join_over_group, sum_over_group

LARGE = 8192
"""Minimum vocabulary size to shard: smaller tables take less memory than a block."""

_VOCAB_SHARD = "vocab_shard"
"""Attribute of a sharded output layer that holds this process's vocabulary range."""

FP32_LOGITS = "fp32_logits"
"""Attribute that an output layer has if its logits are fp32, whatever its weights are."""


def head_input(head: nn.Module | None, hidden: Tensor) -> Tensor:
    """Return the hidden states in the dtype of an output layer's logits, for `output_layer`."""
    return hidden.float() if hasattr(head, FP32_LOGITS) else hidden


def get_vocab_shard(head: nn.Module | None) -> VocabularyShard | None:
    """Return the vocabulary range of an output layer, or None if it is not sharded."""
    return getattr(head, _VOCAB_SHARD, None)


def sharded_tables(model: PreTrainedModel, size: int, *, min_rows: int = LARGE) -> list[nn.Module]:
    """Return the embedding and output layers, if their rows can be sharded.

    A table that is not plain (some families scale the embedding, and peft may adapt it) is not
    sharded, nor is one tied to it.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    plain: list[nn.Module] = [
        module
        for module in (table, head)
        if isinstance(module, nn.Module) and type(module) in (nn.Embedding, nn.Linear)
    ]
    rows = {module: len(cast("Tensor", module.weight)) for module in plain}
    shardable = [m for m in plain if rows[m] >= min_rows and rows[m] % size == 0]
    return [] if tied and len(shardable) < 2 else shardable


def row_shard(module: nn.Module, rank: int, size: int) -> ShardSpec:
    """Return the range of rows of a process."""
    share = cast("Tensor", module.weight).shape[0] // size
    return ShardSpec(0, (Shard(rank * share, (rank + 1) * share),))


def shard_table(module: nn.Module, rows: int, group: Group) -> None:
    """Make an embedding or output layer use only this process's share of its `rows` rows."""
    vocab_shard = VocabularyShard(group.rank * (rows // group.size), group)
    if isinstance(module, nn.Linear):
        setattr(module, _VOCAB_SHARD, vocab_shard)
        object.__setattr__(module, "forward", partial(_logits, module, group))
    else:
        table = cast("nn.Embedding", module)
        object.__setattr__(table, "forward", partial(_look_up, table, vocab_shard))


def _logits(head: nn.Linear, group: Group, hidden: Float[Tensor, "*B d"]) -> Float[Tensor, "*B V"]:
    """Return the logits of the full vocabulary."""
    hidden = copy_to_group(head_input(head, hidden), group)
    logits = output_layer(hidden, head.weight, head.bias)
    return join_over_group(logits, group)


def _look_up(module: nn.Embedding, vocab_shard: VocabularyShard, ids: Tensor, *_: Any) -> Tensor:  # noqa: ANN401
    """Return the embeddings of all tokens, summed over the processes."""
    count, padding = module.weight.shape[0], module.padding_idx
    is_local = (ids >= vocab_shard.first) & (ids < vocab_shard.first + count)
    embeddings = F.embedding(torch.where(is_local, ids - vocab_shard.first, 0), module.weight)
    has_gradient = is_local if padding is None else is_local & (ids != padding)
    embeddings = torch.where(has_gradient[..., None], embeddings, embeddings.detach())
    # Adding -0.0 preserves every value, including -0.0.
    return sum_over_group(torch.where(is_local[..., None], embeddings, -0.0), vocab_shard.group)
