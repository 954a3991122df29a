"""Vocabulary-parallel embeddings and output layers: each process has a range of the rows.

A process looks up the rows in its range, with zeros for other tokens; the sum over processes is the
embedding. An output layer computes the logits of its range. `Policy` computes log-probabilities
from these without gathering them; a direct call of the layer gathers the logits.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.kernels.logprobs import VocabularyShard
from pipeline.parallel.group import Group
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.parallel.tensor import copy_to_group, join_over_group, sum_over_group

LARGE = 8192
"""Minimum vocabulary to shard: smaller tables take less memory than a block."""

_WORDS = "divided_words"
"""Attribute of a sharded output layer that holds this process's vocabulary range."""


def words_of(head: nn.Module | None) -> VocabularyShard | None:
    """Vocabulary range of an output layer; None if it is not sharded."""
    return getattr(head, _WORDS, None)


def divisible_tables(model: PreTrainedModel, size: int, *, least: int = LARGE) -> list[nn.Module]:
    """Embedding and output layer, if their rows can be sharded.

    A table that is not plain (some families scale the embedding, and peft may adapt it) is not
    sharded, nor is one tied to it.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    plain: list[nn.Module] = [
        each
        for each in (table, head)
        if isinstance(each, nn.Module) and type(each) in (nn.Embedding, nn.Linear)
    ]
    rows = {each: len(cast("Tensor", each.weight)) for each in plain}
    found = [each for each in plain if rows[each] >= least and rows[each] % size == 0]
    return [] if tied and len(found) < 2 else found


def rows_of(module: nn.Module, rank: int, size: int) -> ShardSpec:
    """The range of rows of a process."""
    share = cast("Tensor", module.weight).shape[0] // size
    return ShardSpec(0, (Shard(rank * share, (rank + 1) * share),))


def divide_table(module: nn.Module, rows: int, group: Group) -> None:
    """Make an embedding or output layer use only this process's share of its `rows` rows."""
    words = VocabularyShard(group.rank * (rows // group.size), group)
    if isinstance(module, nn.Linear):
        setattr(module, _WORDS, words)
        object.__setattr__(module, "forward", partial(_logits, module, group))
    else:
        table = cast("nn.Embedding", module)
        object.__setattr__(table, "forward", partial(_look_up, table, words))


def _logits(head: nn.Linear, group: Group, hidden: Float[Tensor, "*B d"]) -> Float[Tensor, "*B V"]:
    """The logits of the full vocabulary."""
    own = F.linear(copy_to_group(hidden, group), head.weight, head.bias)
    return join_over_group(own, group)


def _look_up(module: nn.Embedding, words: VocabularyShard, ids: Tensor, *_: Any) -> Tensor:  # noqa: ANN401
    """The embedding of all tokens, summed over the processes."""
    count, padding = module.weight.shape[0], module.padding_idx
    here = (ids >= words.first) & (ids < words.first + count)
    found = F.embedding(torch.where(here, ids - words.first, 0), module.weight)
    learns = here if padding is None else here & (ids != padding)
    found = torch.where(learns[..., None], found, found.detach())
    # Adding -0.0 preserves every value, including -0.0.
    return sum_over_group(torch.where(here[..., None], found, -0.0), words.group)
