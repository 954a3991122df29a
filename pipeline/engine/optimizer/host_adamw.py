"""AdamW on the host for gradients and weights on a GPU, which are copied while it computes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.config import Kernels
from pipeline.kernels.adamw import AdamW, Shard, adamw_
from pipeline.kernels.pinned_memory import pinned_empty

PIECE = 2**23
"""Elements that are updated at once: 32 MiB of an fp32 gradient."""


class HostAdamW:
    """Updates vectors whose masters and moments are in host memory.

    While the host updates a piece, the next gradient arrives on one stream and the previous weights
    leave on another, each through one of two pinned buffers, which are allocated once.

    Args:
        device: tensors on it are copied to host memory and back.
        piece: elements that are updated at once, a multiple of 16.
    """

    def __init__(self, device: torch.device, piece: int = PIECE) -> None:
        self.device, self.piece = device, piece
        count = 2 if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]
        self._buffers: dict[tuple[str, torch.dtype, int], Tensor] = {}
        self._turn = 0

    def step(self, shards: Sequence[Shard], step: AdamW, *, kernels: Kernels) -> None:
        """Take one step, like `Launches.step`; the compute stream waits for the copies."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        pieces = [piece for shard in shards for piece in self._cut(shard)]
        following = self._fetch(pieces[0].gradient)
        for number, piece in enumerate(pieces, 1):
            gradient = following
            for stream in self._streams[:1]:
                stream.synchronize()
            self._turn += 1
            if number < len(pieces):
                following = self._fetch(pieces[number].gradient)
            room = target = piece.weights.copy
            if target is not None and target.device == self.device:
                room = self._buffer("weights", target)
            own = replace(step, lr=piece.lr * step.lr, weight_decay=piece.weight_decay)
            adamw_(replace(piece.weights, copy=room), gradient, own, kernels=kernels)
            for stream in self._streams[1:]:
                stream.synchronize()  # the other buffer can be reused
            if target is not None and room is not None and room is not target:
                self._copy(target, room, 1)
        for stream in self._streams[1:]:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def _cut(self, shard: Shard) -> Iterator[Shard]:
        for start in range(0, len(shard.gradient), self.piece):
            place = slice(start, start + self.piece)
            weights = shard.weights.part(place)
            yield replace(shard, weights=weights, gradient=shard.gradient[place])

    def _fetch(self, gradient: Tensor) -> Tensor:
        if gradient.device != self.device:
            return gradient
        return self._copy(self._buffer("gradient", gradient), gradient, 0)

    def _buffer(self, use: str, like: Tensor) -> Tensor:
        key = (use, like.dtype, self._turn % 2)
        if key not in self._buffers:
            new = pinned_empty if self._streams else torch.empty
            self._buffers[key] = new(self.piece, dtype=like.dtype)
        return self._buffers[key][: len(like)]

    def _copy(self, target: Tensor, source: Tensor, number: int) -> Tensor:
        with torch.cuda.stream(self._streams[number] if self._streams else None):
            return target.copy_(source, non_blocking=True)
