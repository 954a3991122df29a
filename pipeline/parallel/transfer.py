"""Tensors sent between the stages of a pipeline."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.group import TRANSFER_KINDS, Group, StageGroup, TransferKind
from pipeline.system.position import POSITION

TAGS = {kind: number for number, kind in enumerate(TRANSFER_KINDS, start=1)}
"""The tag of each kind of tensor, for backends that support tags."""


class Transfers:
    """Sends tensors to the other pipeline stages and receives tensors from them."""

    def __init__(self, stages: Group) -> None:
        self._stages = stages
        self._sent: deque[tuple[dist.Work, int, Tensor]] = deque()
        """Pending sends: work, rank of the receiver, and the tensor, kept until it has arrived."""
        self.wait_seconds = 0.0
        """Seconds spent waiting for other stages."""

    def send(self, tensor: Tensor, to: int, kind: TransferKind) -> None:
        """Start sending to a stage; `tensor` must not change until it has arrived."""
        tensor = tensor.detach().contiguous()
        rank = self._stages.ranks[to]
        work = dist.isend(tensor, rank, group=self._group(kind), tag=TAGS[kind])
        assert work is not None
        self._sent.append((work, rank, tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(
        self, out: Tensor, source: int, kind: TransferKind, micro_batch: int | None = None
    ) -> Tensor:
        """Receive a tensor from stage `source` into `out`, and return it."""
        rank = self._stages.ranks[source]
        reason = kind if micro_batch is None else f"{kind} of micro-batch {micro_batch}"
        with self._waiting(rank, reason):
            dist.recv(out, rank, group=self._group(kind), tag=TAGS[kind])
        POSITION.transfers += 1
        return out

    def wait(self, *, except_last: int = 0) -> None:
        """Wait until all sent tensors, except the latest `except_last`, have arrived."""
        while len(self._sent) > except_last:
            work, rank, _tensor = self._sent.popleft()
            with self._waiting(rank, "the delivery of sent tensors"):
                work.wait()

    def _group(self, kind: TransferKind) -> dist.ProcessGroup | None:
        stages = self._stages
        if isinstance(stages, StageGroup):
            stages = stages.channels.get(kind, stages)
        return stages.process_group

    @contextmanager
    def _waiting(self, rank: int, reason: str) -> Iterator[None]:
        start = time.perf_counter()
        with POSITION.waiting([rank], reason):
            yield
        self.wait_seconds += time.perf_counter() - start


def send_tensors(tensors: Iterable[tuple[str, Tensor]], stages: Group, *, to: int) -> None:
    """Send named tensors to a stage; a tensor may be overwritten once the next is requested."""
    group, rank = stages.process_group, stages.ranks[to]
    for name, tensor in tensors:
        header = (name, tuple(tensor.shape), tensor.dtype)
        dist.send_object_list([header], rank, group=group)
        dist.send(tensor.contiguous(), rank, group=group)
    dist.send_object_list([None], rank, group=group)


def receive_tensors(
    stages: Group, device: torch.device, *, from_stage: int
) -> Iterator[tuple[str, Tensor]]:
    """Receive the tensors that another stage sends with `send_tensors`."""
    group, rank = stages.process_group, stages.ranks[from_stage]
    while True:
        headers: list[tuple[str, tuple[int, ...], torch.dtype] | None] = [None]
        with POSITION.waiting([rank], "weights for an export"):
            dist.recv_object_list(headers, rank, group=group)
            (header,) = headers
            if header is None:
                return
            name, shape, dtype = header
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, rank, group=group)
        POSITION.transfers += 1
        yield name, tensor
