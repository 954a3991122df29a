"""The processes that compute each layer together: tensor parallelism (Shoeybi et al. 2019).

A group is made of neighbours in rank. All of its collectives are between its own processes, so that
groups generate independently of each other.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from pipeline.distributed import rank, world_size
from pipeline.errors import require
from pipeline.position import HERE
from pipeline.process_group import SECOND_WORD_SECONDS

T = TypeVar("T")

_PEERS, _KV_HEADS = "tensor_parallel_peers", "tensor_parallel_kv_heads"
"""Attributes of a model that is divided."""


@dataclass(frozen=True)
class Peers:
    """A process among those that share a model out; alone, every method does nothing.

    Time in its collectives counts as waiting. They are not among the job's, which all processes
    come to in the same order: groups go their own ways.
    """

    rank: int = 0
    """Of this process in the group."""

    size: int = 1
    group: Any = None
    """The process group."""

    def sum_(self, values: Shaped[Tensor, "*S"]) -> Shaped[Tensor, "*S"]:
        """Sum over the peers, in place; the same bits on each."""
        if self.size > 1:
            with HERE.waiting():
                dist.all_reduce(values, group=self.group)
        return values

    def join_columns(self, part: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
        """The peers' last dimensions side by side, in rank order; all are as long."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with HERE.waiting():
            dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def gather_objects(self, value: T) -> list[T]:
        """The values of all peers, in rank order."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        with HERE.waiting():
            dist.all_gather_object(values, value, group=self.group)
        return values  # pyright: ignore[reportReturnType]  # every entry was filled


ALONE = Peers()


def make_peers(size: int, *, timeout_seconds: float) -> Peers:
    """This process's group of `size` neighbours in rank; all processes call it.

    Raises:
        ConfigError: the processes can't be cut into groups of that size.
    """
    require(
        world_size() % size == 0,
        f"inference_tp_size {size} doesn't divide the {world_size()} processes; choose one that"
        " does, or start another number of processes",
    )
    if size == 1:
        return ALONE
    own = ALONE
    # The watch has the first word, as with the group of all processes.
    patience = timedelta(seconds=timeout_seconds + SECOND_WORD_SECONDS)
    for first in range(0, world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, timeout=patience)
        if rank() in ranks:
            own = Peers(rank=rank() - first, size=size, group=group)
    return own


def mark(model: nn.Module, peers: Peers, *, kv_heads: int) -> None:
    """Say which processes a model is divided among, and how many heads of keys this one has.

    Generation with it then takes all of them.
    """
    setattr(model, _PEERS, peers)
    setattr(model, _KV_HEADS, kv_heads)


def peers_of(model: nn.Module) -> Peers:
    """The processes that `model` was divided among."""
    return getattr(model, _PEERS, ALONE)


def kv_heads_here(model: nn.Module) -> int | None:
    """Heads of keys that this process has of a divided model; None of any other."""
    return getattr(model, _KV_HEADS, None)
