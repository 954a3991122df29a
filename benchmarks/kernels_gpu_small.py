"""The phase `small` of `benchmarks.kernels_gpu`: storing keys and values, and drawing tokens."""

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.kernels_gpu_bench import HEADS, Bench
from inference.engine.sampling import Sampler, inverse_transform
from pipeline.kernels.cache_append.cuda import append_
from pipeline.kernels.sampling.cuda import sample
from pipeline.kernels.sampling.definition import Draw

DRAWS: Mapping[str, Draw] = {
    "all words": Draw(seed=0, temperature=1.0),
    "top-p 0.9": Draw(seed=0, temperature=1.0, top_p=0.9),
    "top-k 50, top-p 0.9": Draw(seed=0, temperature=1.0, top_k=50, top_p=0.9),
}
"""Beside PyTorch, which sorts for the nucleus."""


def run_small(bench: Bench, _: argparse.Namespace) -> None:
    """64 sequences: a layer's keys and values into their slots, and a token of each."""
    for model in bench.in_time("small", list(HEADS)):
        _time_append(bench, model)
    words = (300,) if bench.tiny else (50_272, 128_256)
    cases = [(name, number) for number in words for name in DRAWS]
    for name, number in bench.in_time("small", cases):
        _time_sample(bench, name, number)


def _time_append(bench: Bench, model: str) -> None:
    _, heads, size = HEADS[model]
    device, batch, width = bench.gpu.device, 4 if bench.tiny else 64, 8 if bench.tiny else 544

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    cache = (numbers(batch, heads, width, size), numbers(batch, heads, width, size))
    states = tuple(numbers(batch, heads, size).transpose(0, 1) for _ in cache)
    places = torch.arange(batch, device=device) * width + 3
    rows = (torch.arange(batch, device=device)[:, None] * heads).add(
        torch.arange(heads, device=device)
    )
    rows = (rows * width + 3).flatten()

    def ours() -> None:
        append_(cache, (states[0], states[1]), places, gpu=bench.gpu)

    def pytorch() -> None:
        for stored, new in zip(cache, states, strict=True):
            stored.view(-1, size).index_copy_(0, rows, new.transpose(0, 1).reshape(-1, size))

    with bench.memory():
        seconds = bench.seconds([ours])
    bench.record("small", what=f"cache, {model}", ours=seconds, pytorch=bench.seconds([pytorch]))


def _time_sample(bench: Bench, name: str, num_words: int) -> None:
    device, draw = bench.gpu.device, DRAWS[name]
    batch = 2 if bench.tiny else 64
    logits = 3 * torch.randn(batch, num_words, device=device)
    logits = logits.to(torch.bfloat16)
    numbers = torch.zeros(2, batch, dtype=torch.int64, device=device)
    points = torch.rand(batch, dtype=torch.float64, device=device)
    sampler = Sampler(temperature=1.0, seed=0, top_k=draw.top_k, top_p=draw.top_p)

    def ours() -> None:
        sample(logits, numbers[0], numbers[1], draw, gpu=bench.gpu)

    def pytorch() -> None:
        # What the generation engine does without the kernel, but for the way to the host.
        logprobs = logits.float().log_softmax(dim=-1)
        tokens = inverse_transform(sampler.truncated(logprobs.exp()), points)
        logprobs.gather(-1, tokens[:, None])

    with bench.memory():
        seconds = bench.seconds([ours])
    bench.record(
        "small",
        what=f"sampler, {num_words} words, {name}",
        ours=seconds,
        pytorch=bench.seconds([pytorch]),
    )
