"""Tensors that stages of a pipeline send each other.

Before each goes a header of two numbers, the micro-batch and the elements: so a stage that is at
another micro-batch than its neighbour, or has cut the rows otherwise, is found before its numbers
are used. Tensors may be of any length, each of its own.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.group import Group, StageGroup, What
from pipeline.system.position import HERE, DesyncError

TAGS: dict[What, int] = {
    what: 2 * number
    for number, what in enumerate(
        ("hidden states", "gradients", "tied gradients", "tied weights"), start=1
    )
}
"""The tag of each kind of tensor; its header has the next one. Where backends heed tags they tell
transfers apart."""


class Sent(NamedTuple):
    """A tensor on its way, which is kept until it has arrived."""

    works: tuple[dist.Work, dist.Work]
    tensors: tuple[Tensor, Tensor]
    """Its header and itself."""

    to: int


class Transfers:
    """What this stage sends to and receives from the others of its pipeline."""

    def __init__(self, stages: Group) -> None:
        self._stages = stages
        self._sent: deque[Sent] = deque()
        self.waited = 0.0
        """Seconds, for other stages."""

    def send(self, tensor: Tensor, to: int, what: What, micro_batch: int) -> None:
        """Begin to send to a stage; `tensor` must not change until it has arrived.

        Args:
            tensor: of any length.
            to: the stage.
            what: the kind of tensor.
            micro_batch: that it is of.
        """
        header = torch.tensor([micro_batch, tensor.numel()], device=tensor.device)
        tensors = (header, tensor.detach().contiguous())
        group, rank = self._group(what), self._stages.ranks[to]
        works: list[dist.Work] = []
        for each, tag in zip(tensors, (TAGS[what] + 1, TAGS[what]), strict=True):
            work = dist.isend(each, rank, group=group, tag=tag)
            assert work is not None
            works.append(work)
        self._sent.append(Sent((works[0], works[1]), tensors, to))
        while self._sent and all(work.is_completed() for work in self._sent[0].works):
            self._sent.popleft()

    def receive(self, out: Tensor, from_stage: int, what: What, micro_batch: int) -> Tensor:
        """Wait for what a stage sends, and have it in `out`, which is returned.

        Raises:
            DesyncError: it is of another micro-batch or length.
        """
        header = torch.empty(2, dtype=torch.int64, device=out.device)
        group, rank = self._group(what), self._stages.ranks[from_stage]
        with self._waiting(rank, f"{what} of micro-batch {micro_batch}"):
            dist.recv(header, rank, group=group, tag=TAGS[what] + 1)
            found, numel = header.tolist()
            if (found, numel) != (micro_batch, out.numel()):
                raise DesyncError(
                    f"rank {self._stages.global_rank} waited for {what} of micro-batch"
                    f" {micro_batch}, {out.numel()} numbers, and rank {rank} sent those of"
                    f" micro-batch {found}, {numel} numbers; all stages must read the same rows"
                )
            dist.recv(out, rank, group=group, tag=TAGS[what])
        HERE.transfers += 1
        return out

    def settle(self, *, but: int = 0) -> None:
        """Wait until what was sent has arrived, but for that many of the last tensors."""
        while len(self._sent) > but:
            self._wait_for(self._sent.popleft())

    def _wait_for(self, sent: Sent) -> None:
        with self._waiting(self._stages.ranks[sent.to], "the arrival of what was sent to it"):
            for work in sent.works:
                work.wait()

    def _group(self, what: What) -> dist.ProcessGroup | None:
        stages = self._stages
        if isinstance(stages, StageGroup) and stages.channels:
            return stages.channels[what]
        return stages.process_group

    @contextmanager
    def _waiting(self, rank: int, at: str) -> Iterator[None]:
        start = time.perf_counter()
        with HERE.waiting([rank], at):
            yield
        self.waited += time.perf_counter() - start


def send_named(named: Iterable[tuple[str, Tensor]], stages: Group, *, to: int) -> None:
    """Send a stage tensors with their names; each may change when the next is asked for."""
    group, rank = stages.process_group, stages.ranks[to]
    for name, tensor in named:
        head = (name, tuple(tensor.shape), tensor.dtype)
        dist.send_object_list([head], rank, group=group)
        dist.send(tensor.contiguous(), rank, group=group)
    dist.send_object_list([None], rank, group=group)


def receive_named(
    stages: Group, device: torch.device, *, from_stage: int
) -> Iterator[tuple[str, Tensor]]:
    """What another stage sends by `send_named`."""
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
