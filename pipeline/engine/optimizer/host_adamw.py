"""AdamW on the host; gradients and weights on a GPU are copied while the host computes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.config import Kernels
from pipeline.kernels.adamw import AdamW, Shard, adamw_
from pipeline.kernels.pinned_memory import pinned_empty

CHUNK = 2**23
"""Number of elements updated at once: 32 MiB of an fp32 gradient."""


class HostAdamW:
    """Updates vectors whose masters and moments are in host memory.

    While the host updates a chunk, one stream copies the next gradient to the host and another the
    previous weights to the GPU, each through one of two pinned buffers, which are allocated once.
    `chunk` is the number of elements updated at once, a multiple of 16.
    """

    def __init__(self, device: torch.device, chunk: int = CHUNK) -> None:
        self.device, self.chunk = device, chunk
        num_streams = 2 if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(num_streams)]
        self._buffers: dict[tuple[str, torch.dtype, int], Tensor] = {}
        self._buffer_index = 0

    def step(self, shards: Sequence[Shard], step: AdamW, *, kernels: Kernels) -> None:
        """Take one step, like `FlatAdamW.step`; the compute stream waits for the copies."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        chunks = [chunk for shard in shards for chunk in self._split(shard)]
        next_gradient = self._fetch(chunks[0].gradient)
        for number, chunk in enumerate(chunks, 1):
            gradient = next_gradient
            for stream in self._streams[:1]:
                stream.synchronize()
            self._buffer_index += 1
            if number < len(chunks):
                next_gradient = self._fetch(chunks[number].gradient)
            staging = target = chunk.weights.copy
            if target is not None and target.device == self.device:
                staging = self._buffer("weights", target)
            scaled_step = replace(step, lr=chunk.lr * step.lr, weight_decay=chunk.weight_decay)
            adamw_(replace(chunk.weights, copy=staging), gradient, scaled_step, kernels=kernels)
            for stream in self._streams[1:]:
                stream.synchronize()  # the other buffer can be reused
            if target is not None and staging is not None and staging is not target:
                self._copy(target, staging, 1)
        for stream in self._streams[1:]:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def _split(self, shard: Shard) -> Iterator[Shard]:
        for start in range(0, len(shard.gradient), self.chunk):
            span = slice(start, start + self.chunk)
            weights = shard.weights.narrow(span)
            yield replace(shard, weights=weights, gradient=shard.gradient[span])

    def _fetch(self, gradient: Tensor) -> Tensor:
        if gradient.device != self.device:
            return gradient
        return self._copy(self._buffer("gradient", gradient), gradient, 0)

    def _buffer(self, use: str, like: Tensor) -> Tensor:
        key = (use, like.dtype, self._buffer_index % 2)
        if key not in self._buffers:
            allocate = pinned_empty if self._streams else torch.empty
            self._buffers[key] = allocate(self.chunk, dtype=like.dtype)
        return self._buffers[key][: len(like)]

    def _copy(self, target: Tensor, source: Tensor, stream_index: int) -> Tensor:
        with torch.cuda.stream(self._streams[stream_index] if self._streams else None):
            return target.copy_(source, non_blocking=True)
