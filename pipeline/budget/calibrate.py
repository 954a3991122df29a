"""A block of a transformer, timed on this machine with random numbers for weights.

It has what blocks of today's models have in common: normalization, rotated queries and keys, causal
attention, a gated layer; each function's result is kept, so that a plan times a shape once.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_WIDTH = 64

WORTH_THREADS = 2e-3
"""Seconds of a call below which threads gain nothing."""


@dataclass(frozen=True)
class Timing:
    """How a block is run to be timed."""

    threads: int
    trains: bool
    """Forward and backward, with the gradients of the weights."""

    narrow: bool
    """Whether it computes in bf16, else in fp32."""


@functools.cache
def block_seconds(width: int, inner: int, tokens: int, length: int, how: Timing) -> float:
    """Seconds of a block, its gated layer `inner` wide, on `tokens` in sequences of `length`."""
    dtype = torch.bfloat16 if how.narrow else torch.float32
    heads = max(1, width // HEAD_WIDTH)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(0.02).to(dtype)

    shapes = ((3 * width, width), (width, width), (inner, width), (inner, width), (width, inner))
    matrices = [random(*shape).requires_grad_(how.trains) for shape in shapes]
    scale = torch.ones(width, dtype=dtype, requires_grad=how.trains)
    count = max(1, tokens // length)
    hidden = random(count * length, width).requires_grad_(how.trains)
    angle = random(1, length, 1, width // heads)

    def normalized(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype) * scale

    def rotated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * angle + torch.cat((-right, left), -1) * angle

    def forward() -> Tensor:
        joined = F.linear(normalized(hidden), matrices[0]).view(count, length, 3, heads, -1)
        query, key = (rotated(joined[:, :, each]).transpose(1, 2) for each in (0, 1))
        value = joined[:, :, 2].transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = hidden + F.linear(mixed.transpose(1, 2).reshape(hidden.shape), matrices[1])
        y = normalized(x)
        gated = F.silu(F.linear(y, matrices[2])) * F.linear(y, matrices[3])
        return x + F.linear(gated, matrices[4])

    return _pass_seconds(forward, [hidden, scale, *matrices], how) * tokens / (count * length)


@functools.cache
def head_seconds(width: int, vocabulary: int, tokens: int, how: Timing) -> float:
    """Seconds of the logits and the log-probability of one of them for each token."""
    dtype = torch.bfloat16 if how.narrow else torch.float32
    weight = torch.zeros(vocabulary, width, dtype=dtype, requires_grad=how.trains)
    hidden = torch.zeros(tokens, width, dtype=dtype, requires_grad=how.trains)
    targets = torch.zeros(tokens, 1, dtype=torch.int64)

    def forward() -> Tensor:
        return F.linear(hidden, weight).float().log_softmax(-1).gather(-1, targets)

    return _pass_seconds(forward, [weight, hidden], how)


@functools.cache
def update_seconds(size: int, threads: int) -> float:
    """Seconds of AdamW on that many weights."""
    weight = torch.zeros(size, requires_grad=True)
    weight.grad = torch.ones(size)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return _seconds(optimizer.step, threads)


def _pass_seconds(forward: Callable[[], Tensor], inputs: list[Tensor], how: Timing) -> float:
    if not how.trains:
        with torch.no_grad():
            return _seconds(forward, how.threads)

    def both() -> None:
        for each in inputs:
            each.grad = None
        forward().sum().backward()

    return _seconds(both, how.threads)


def _seconds(run: Callable[[], object], threads: int) -> float:
    """Seconds of a call on an idle machine, in one thread or all, whichever is faster.

    One thread is timed by the processor time it takes, which others on the machine don't add to.
    """
    before = torch.get_num_threads()
    try:
        alone = _best(run, 1, time.thread_time)
        if threads == 1 or alone < WORTH_THREADS:
            return alone
        return min(alone, _best(run, threads, time.perf_counter))
    finally:
        torch.set_num_threads(before)


def _best(run: Callable[[], object], threads: int, clock: Callable[[], float]) -> float:
    """The shortest of a few calls, after one that doesn't count."""
    torch.set_num_threads(threads)
    run()
    seconds: list[float] = []
    while not seconds or (sum(seconds) < 0.01 and len(seconds) < 5):
        began = clock()
        run()
        seconds.append(clock() - began)
    return min(seconds)
