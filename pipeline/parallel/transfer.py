"""Tensors that stages of a pipeline send each other.

Before each goes a header of three numbers, the micro-batch, the chunk of the model and the
elements: so a stage that is at another micro-batch than its neighbour, or has cut the rows
otherwise, is found before its numbers are used. Tensors may be of any length, each of its own.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.group import Group
from pipeline.position import HERE, DesyncError

What = Literal["hidden states", "gradients", "tied gradients", "tied weights"]
TAGS: dict[What, int] = {
    what: 2 * number
    for number, what in enumerate(
        ("hidden states", "gradients", "tied gradients", "tied weights"), start=1
    )
}
"""Of a tensor; its header has the next one."""


class Transfers:
    """What this stage sends to and receives from the others of its pipeline."""

    def __init__(self, stages: Group) -> None:
        self._stages = stages
        self._sent: deque[tuple[dist.Work, Tensor, int]] = deque()
        self.waited = 0.0
        """Seconds, for other stages."""

    def send(self, tensor: Tensor, to: int, what: What, micro_batch: int, chunk: int = 0) -> None:
        """Begin to send to a stage; `tensor` must not change until `settle`.

        `chunk` is that of the whole model that the tensor goes to.
        """
        header = torch.tensor([micro_batch, chunk, tensor.numel()], device=tensor.device)
        group, rank = self._stages.process_group, self._stages.ranks[to]
        for each, tag in ((header, TAGS[what] + 1), (tensor.detach().contiguous(), TAGS[what])):
            work = dist.isend(each, rank, group=group, tag=tag)
            assert work is not None
            self._sent.append((work, each, rank))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(
        self, out: Tensor, from_stage: int, what: What, micro_batch: int, chunk: int = 0
    ) -> Tensor:
        """Wait for what a stage sends, and have it in `out`, which is returned.

        Raises:
            DesyncError: it is of another micro-batch, chunk or length.
        """
        header = torch.empty(3, dtype=torch.int64, device=out.device)
        group, rank = self._stages.process_group, self._stages.ranks[from_stage]
        with self._waiting(rank, f"{what} of micro-batch {micro_batch}"):
            dist.recv(header, rank, group=group, tag=TAGS[what] + 1)
            found, place, numel = header.tolist()
            if (found, place, numel) != (micro_batch, chunk, out.numel()):
                raise DesyncError(
                    f"rank {self._stages.global_rank} waited for {what} of micro-batch"
                    f" {micro_batch}, {out.numel()} numbers for chunk {chunk}, and rank {rank} sent"
                    f" those of micro-batch {found}, {numel} numbers for chunk {place}; all stages"
                    " must read the same rows"
                )
            dist.recv(out, rank, group=group, tag=TAGS[what])
        HERE.transfers += 1
        return out

    def settle(self, *, but: int = 0) -> None:
        """Wait until what was sent has arrived, but for that many of the last tensors."""
        while len(self._sent) > 2 * but:
            work, _, rank = self._sent.popleft()
            with self._waiting(rank, "the arrival of what was sent to it"):
                work.wait()

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
