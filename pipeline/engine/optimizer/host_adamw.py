"""AdamW in main memory over gradients and weights on a GPU, which are copied while it computes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.config import Kernels
from pipeline.kernels.adamw import AdamW, Shard, adamw_
from pipeline.kernels.pinned_memory import pinned_empty

PIECE = 2**23
"""Elements that are stepped at once: 32 MiB of an fp32 gradient."""


class HostAdamW:
    """Steps of vectors whose masters and moments are in main memory.

    While the host steps a piece, the next gradient arrives on one stream and the previous weights
    leave on another. Both use two pinned buffers of one piece, which are allocated once.

    Args:
        device: tensors on it are copied to main memory and back.
        piece: elements that are stepped at once, a multiple of 16.
    """

    def __init__(self, device: torch.device, piece: int = PIECE) -> None:
        self.device, self.piece = device, piece
        self._on_gpu = device.type == "cuda"
        self._arriving, self._leaving = (
            torch.cuda.Stream(device) if self._on_gpu else None for _ in range(2)
        )
        self._buffers: dict[tuple[str, torch.dtype, int], Tensor] = {}
        self._left: list[torch.cuda.Event | None] = [None, None]
        """Events after which a buffer of weights may be filled again."""

    def step(self, shards: Sequence[Shard], step: AdamW, *, kernels: Kernels) -> None:
        """One step of all shards, as `Launches.step`; copies to the GPU may still be pending."""
        for stream in (self._arriving, self._leaving):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))
        pieces = [piece for shard in shards for piece in self._cut(shard)]
        following = self._fetch(pieces[0].gradient, 0)
        for turn, piece in enumerate(pieces):
            gradient, arrived = following
            if turn + 1 < len(pieces):
                following = self._fetch(pieces[turn + 1].gradient, turn + 1)
            for event in (arrived, self._left[turn % 2]):
                if event is not None:
                    event.synchronize()
            room = target = piece.weights.copy
            if target is not None and target.device == self.device:
                room = self._buffer("weights", target, turn)
            own = replace(step, lr=piece.lr * step.lr, weight_decay=piece.weight_decay)
            adamw_(replace(piece.weights, copy=room), gradient, own, kernels=kernels)
            if target is not None and room is not None and room is not target:
                _, self._left[turn % 2] = self._copy(target, room, self._leaving)
        if self._leaving is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._leaving)

    def _cut(self, shard: Shard) -> Iterator[Shard]:
        for start in range(0, len(shard.gradient), self.piece):
            place = slice(start, start + self.piece)
            part = shard.weights.part(place)
            yield replace(shard, weights=part, gradient=shard.gradient[place])

    def _fetch(self, gradient: Tensor, turn: int) -> tuple[Tensor, torch.cuda.Event | None]:
        if gradient.device != self.device:
            return gradient, None
        return self._copy(self._buffer("gradient", gradient, turn), gradient, self._arriving)

    def _buffer(self, use: str, like: Tensor, turn: int) -> Tensor:
        key = (use, like.dtype, turn % 2)
        if key not in self._buffers:
            new = pinned_empty if self._on_gpu else torch.empty
            self._buffers[key] = new(self.piece, dtype=like.dtype)
        return self._buffers[key][: len(like)]

    def _copy(
        self, target: Tensor, source: Tensor, stream: torch.cuda.Stream | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        event = None if stream is None else torch.cuda.Event()
        with torch.cuda.stream(stream):  # pyright: ignore[reportArgumentType]
            target.copy_(source, non_blocking=True)
            if event is not None:
                event.record()
        return target, event
