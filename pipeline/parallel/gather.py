"""torch's collectives whose names have changed."""

import warnings

import torch.distributed as dist
from torch import Tensor


def all_gather(full: Tensor, shard: Tensor, process_group: dist.ProcessGroup | None) -> dist.Work:
    """Begin to fill the flat `full` with the shards of all processes, in rank order."""
    # Its name before torch 2.13 was all_gather_into_tensor.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        work = gather(full, shard, group=process_group, async_op=True)
    assert work is not None  # as it is where nobody waits
    return work


def reduce_scatter(
    shard: Tensor, full: Tensor, process_group: dist.ProcessGroup | None
) -> dist.Work:
    """Begin to fill the flat `shard` with the sum of all processes' pieces of that place."""
    # Its name before torch 2.13 was reduce_scatter_tensor.
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        work = reduce(shard, full, group=process_group, async_op=True)
    assert work is not None
    return work
