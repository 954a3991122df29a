"""Communication of tensor and sequence parallelism, with its gradients.

Each function is a collective in the forward pass and its conjugate in the backward pass: f and g of
Megatron-LM (Shoeybi et al. 2019, section 3), and those of sequence parallelism, where each process
has the hidden states of some tokens (Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models", section 4.2.2). Sums are trees in rank order, in fp32 and rounded once,
so that they are bitwise identical on all processes and on any transport.

With sequence parallelism a row's tokens are padded with zeros and divided into shards of equal
length. Dimension names: N is the number of tokens, n that of one process, d the hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pipeline.parallel.group import Group, tree_sum

GRADIENTS = "gradients of hidden states"


class _Collective(torch.autograd.Function):
    """A collective on a tensor, and another one on its gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        values: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.backward_fn = backward
        return forward(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return ctx.backward_fn(gradients[0]), None, None


def copy_to_group(values: Float[Tensor, "*S"], group: Group) -> Float[Tensor, "*S"]:
    """Return the replicated `values` unchanged; the backward pass all-reduces their gradient."""
    return _Collective.apply(
        values, lambda full: full.view_as(full), lambda grad: _sum(grad, group, GRADIENTS)
    )


def sum_over_group(values: Float[Tensor, "*S"], group: Group) -> Float[Tensor, "*S"]:
    """Sum `values` over the group (all-reduce); the backward pass is the identity."""
    return _Collective.apply(
        values, lambda local: _sum(local, group, "hidden states"), lambda grad: grad
    )


def join_over_group(local: Float[Tensor, "*B n"], group: Group) -> Float[Tensor, "*B m"]:
    """Concatenate along the last dimension; the backward pass returns the local gradient."""
    return _Collective.apply(
        local, lambda local: _join(local, group, "outputs"), lambda grad: _chunk(grad, group)
    )


def split_over_group(values: Float[Tensor, "*B m"], group: Group) -> Float[Tensor, "*B n"]:
    """Return this process's shard of the last dimension; the backward pass joins gradients."""
    return _Collective.apply(
        values, lambda full: _chunk(full, group), lambda grad: _join(grad, group, GRADIENTS)
    )


def split_tokens(values: Float[Tensor, "*B N d"], group: Group) -> Float[Tensor, "*B n d"]:
    """Return this process's share of the tokens; the backward pass gathers the gradients."""
    num_tokens = values.shape[-2]
    return _Collective.apply(
        values,
        lambda full: _local_tokens(full, group),
        lambda grad: _all_gather_tokens(grad, num_tokens, group, GRADIENTS),
    )


def join_tokens(
    shard: Float[Tensor, "*B n d"], num_tokens: int, group: Group
) -> Float[Tensor, "*B N d"]:
    """Gather all tokens for replicated computation; the backward pass keeps local gradients."""
    return _Collective.apply(
        shard,
        lambda local: _all_gather_tokens(local, num_tokens, group, "tokens"),
        lambda grad: _local_tokens(grad, group),
    )


def gather_tokens(
    shard: Float[Tensor, "*B n d"], num_tokens: int, group: Group
) -> Float[Tensor, "*B N d"]:
    """Gather all tokens for sharded computation; the backward pass reduce-scatters gradients."""
    return _Collective.apply(
        shard,
        lambda local: _all_gather_tokens(local, num_tokens, group, "tokens"),
        lambda grad: _reduce_scatter_tokens(grad, group, GRADIENTS),
    )


def reduce_scatter_tokens(values: Float[Tensor, "*B N d"], group: Group) -> Float[Tensor, "*B n d"]:
    """Sum over processes, keeping the local tokens; the backward pass gathers the gradients."""
    num_tokens = values.shape[-2]
    return _Collective.apply(
        values,
        lambda local: _reduce_scatter_tokens(local, group, "tokens"),
        lambda grad: _all_gather_tokens(grad, num_tokens, group, GRADIENTS),
    )


def _sum(values: Tensor, group: Group, label: str) -> Tensor:
    return tree_sum(group.all_gather(values, label=label))


def _join(local: Tensor, group: Group, label: str) -> Tensor:
    return torch.cat(group.all_gather(local, label=label), dim=-1)


def _chunk(values: Tensor, group: Group) -> Tensor:
    return values.chunk(group.size, dim=-1)[group.rank].contiguous()


def _pad_and_split(values: Tensor, group: Group) -> Tensor:
    """Split the tokens into equal shards, one per process: (processes, *B, n, d)."""
    size = -(-values.shape[-2] // group.size)
    padded = F.pad(values, (0, 0, 0, size * group.size - values.shape[-2]))
    return padded.unflatten(-2, (group.size, size)).movedim(-3, 0)


def _local_tokens(values: Tensor, group: Group) -> Tensor:
    shards = _pad_and_split(values, group)
    return shards[group.rank].clone(memory_format=torch.contiguous_format)


def _all_gather_tokens(shard: Tensor, num_tokens: int, group: Group, label: str) -> Tensor:
    full = torch.cat(group.all_gather(shard, label=label), dim=-2)
    return full if full.shape[-2] == num_tokens else full[..., :num_tokens, :].clone()


def _reduce_scatter_tokens(values: Tensor, group: Group, label: str) -> Tensor:
    return tree_sum(group.all_to_all(_pad_and_split(values, group), label=label).unbind())
