"""Tensor parallelism (Shoeybi et al. 2019): a model and the group that computes it together.

And the group whose processes have a model each, and the same prompts for it. Time in the groups'
collectives counts as waiting.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from pipeline.parallel.group import ALONE, Group
from pipeline.parallel.sums import tree_sum
from pipeline.position import HERE

_TP_GROUP, _KV_HEADS = "tensor_parallel_group", "tensor_parallel_kv_heads"
"""Attributes that a divided model has: its group, and its heads of keys and values."""

_SHARING = "same_prompts_group"
"""Attribute of a model that others with the same prompts have too."""
_OF_SHARDING = "is_of_sharding"
"""Attribute that marks a hook which sharding has put on a module."""

Hook = TypeVar("Hook", bound=Callable[..., object])


def sum_(values: Shaped[Tensor, "*S"], group: Group) -> Shaped[Tensor, "*S"]:
    """Sum over the group, in place; the same bits on each process."""
    if group.size > 1 and values.is_cuda:
        with HERE.waiting(group.others):
            dist.all_reduce(values, group=group.process_group)
    elif group.size > 1:
        values.copy_(tree_sum(group.gather(values, what="hidden states")))
    return values


def join_columns(part: Float[Tensor, "*B n"], group: Group) -> Float[Tensor, "*B m"]:
    """The processes' last dimensions side by side, in rank order; all are as long."""
    return torch.cat(group.gather(part, what="outputs"), dim=-1)


def mark(model: nn.Module, group: Group, *, kv_heads: int) -> None:
    """Say which processes a model is divided among, and how many heads of keys this one has.

    Generation with it then takes all of them.
    """
    setattr(model, _TP_GROUP, group)
    setattr(model, _KV_HEADS, kv_heads)


def tp_group_of(model: nn.Module) -> Group:
    """The processes that `model` was divided among."""
    return getattr(model, _TP_GROUP, ALONE)


def kv_heads_here(model: nn.Module) -> int | None:
    """Heads of keys that this process has of a divided model; None of any other."""
    return getattr(model, _KV_HEADS, None)


def mark_sharing(model: nn.Module, group: Group) -> None:
    """Say which processes have such a model each, and the same prompts for it.

    Each then answers its part of them, and generation takes all of the group.
    """
    setattr(model, _SHARING, group)


def sharing_of(model: nn.Module) -> Group:
    """The processes that have the same prompts for `model`, each with one of its own."""
    return getattr(model, _SHARING, ALONE)


def of_sharding(hook: Hook) -> Hook:
    """Mark a hook by which the processes compute a layer together, as those of nobody else."""
    setattr(hook, _OF_SHARDING, True)
    return hook


def is_of_sharding(hook: Callable[..., object]) -> bool:
    """Whether a hook was marked so."""
    return getattr(hook, _OF_SHARDING, False)
