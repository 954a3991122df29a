"""Tensors sent between the stages of a pipeline."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.group import WHATS, Group, StageGroup, What
from pipeline.system.position import HERE

TAGS: dict[What, int] = {what: number for number, what in enumerate(WHATS, start=1)}
"""The tag of each kind of tensor, for backends that have tags."""


class Transfers:
    """Sends to and receives from the other stages of the pipeline."""

    def __init__(self, stages: Group) -> None:
        self._stages = stages
        self._sent: deque[tuple[dist.Work, int, Tensor]] = deque()
        """Pending sends: work, rank of the receiver, and the tensor, kept until it has arrived."""
        self.waited = 0.0
        """Seconds of waiting for other stages."""

    def send(self, tensor: Tensor, to: int, what: What) -> None:
        """Start sending to a stage; `tensor` must not change until it has arrived."""
        tensor = tensor.detach().contiguous()
        rank = self._stages.ranks[to]
        work = dist.isend(tensor, rank, group=self._group(what), tag=TAGS[what])
        assert work is not None
        self._sent.append((work, rank, tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(self, out: Tensor, from_stage: int, what: What, micro_batch: int) -> Tensor:
        """Receive a tensor from a stage into `out`, and return it."""
        rank = self._stages.ranks[from_stage]
        with self._waiting(rank, f"{what} of micro-batch {micro_batch}"):
            dist.recv(out, rank, group=self._group(what), tag=TAGS[what])
        HERE.transfers += 1
        return out

    def settle(self, *, but: int = 0) -> None:
        """Wait until all sent tensors, except the latest `but`, have arrived."""
        while len(self._sent) > but:
            work, rank, _tensor = self._sent.popleft()
            with self._waiting(rank, "its receipt of sent tensors"):
                work.wait()

    def _group(self, what: What) -> dist.ProcessGroup | None:
        stages = self._stages
        if isinstance(stages, StageGroup):
            stages = stages.channels.get(what, stages)
        return stages.process_group

    @contextmanager
    def _waiting(self, rank: int, at: str) -> Iterator[None]:
        start = time.perf_counter()
        with HERE.waiting([rank], at):
            yield
        self.waited += time.perf_counter() - start


def send_named(named: Iterable[tuple[str, Tensor]], stages: Group, *, to: int) -> None:
    """Send named tensors to a stage; each may change when the next is requested."""
    group, rank = stages.process_group, stages.ranks[to]
    for name, tensor in named:
        head = (name, tuple(tensor.shape), tensor.dtype)
        dist.send_object_list([head], rank, group=group)
        dist.send(tensor.contiguous(), rank, group=group)
    dist.send_object_list([None], rank, group=group)


def receive_named(
    stages: Group, device: torch.device, *, from_stage: int
) -> Iterator[tuple[str, Tensor]]:
    """Receive the tensors that another stage sends with `send_named`."""
    group, rank = stages.process_group, stages.ranks[from_stage]
    while True:
        heads: list[tuple[str, tuple[int, ...], torch.dtype] | None] = [None]
        with HERE.waiting([rank], "weights for an export"):
            dist.recv_object_list(heads, rank, group=group)
            (head,) = heads
            if head is None:
                return
            name, shape, dtype = head
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, rank, group=group)
        HERE.transfers += 1
        yield name, tensor
