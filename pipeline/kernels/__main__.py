"""`python -m pipeline.kernels`: what is built, what PyTorch does instead and why, and how fast.

Times are medians of a few calls on the threads that PyTorch uses, in milliseconds; the reference is
the operator's definition in PyTorch, and `without` what runs where there is no kernel if that is
something else.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.cli import run_main, say
from pipeline.config import Kernels
from pipeline.kernels import (
    append_reference,
    causal_reference,
    choice,
    decode_reference,
    reference,
    sampling_reference,
)
from pipeline.kernels.adam import adamw_, find
from pipeline.kernels.causal import causal_attention
from pipeline.kernels.cpu import attention, attention_grad, linear
from pipeline.kernels.cpu import decode as cpu_decode
from pipeline.kernels.cpu import draw as cpu_draw
from pipeline.kernels.cpu.build import Built, NotBuiltError, cache_directory
from pipeline.kernels.cuda import append, decode, sample
from pipeline.kernels.cuda.gpu import Gpu
from pipeline.kernels.decode_reference import Scores
from pipeline.kernels.logprobs import linear_logprobs
from pipeline.kernels.reference import AdamW, Weights
from pipeline.kernels.sampling_reference import Draw

CALLS = 5
FORMATS = (None, torch.bfloat16, torch.float16)
"""Of the weights; None is fp32, which are their own masters."""

WIDTH, WORDS = 64, 32_768

SEQUENCES, HEADS, HEAD_SIZE = 16, 16, 64
"""Of generation: rows of a linear layer, queries of attention, logits of the sampler."""

NO_GPU = "its kernel is for GPUs, and PyTorch finds none here"


@dataclass(frozen=True)
class Row:
    """An operator on this machine."""

    operator: str
    times: tuple[float | None, float | None, float | None]
    """As it is done here, without the kernel, and by the definition, in seconds."""

    state: str


def adamw_row(device: torch.device, copy: torch.dtype | None, elements: int) -> Row:
    """AdamW as the engine uses it, for weights in this format."""
    split = copy == torch.bfloat16
    found = find(device, copy=None if split else copy, split=split)
    generator = torch.Generator().manual_seed(0)
    master, gradient = torch.randn(2, elements, generator=generator).to(device)
    exp_avg, exp_avg_sq = torch.zeros(2, elements, device=device)
    out = low_bits = None
    if split:
        master, low_bits = reference.split_master(master)
    elif copy is not None:
        out = torch.empty(elements, dtype=copy, device=device)
    weights = Weights(master, exp_avg, exp_avg_sq, out, low_bits)
    step = AdamW(lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1, multiplier=0.5)

    def with_kernels(kernels: Kernels) -> float:
        return median_seconds(lambda: adamw_(weights, gradient, step, kernels=kernels))

    name = f"AdamW on {device.type}, {torch.float32 if copy is None else copy} weights"
    times = (
        with_kernels("auto"),
        with_kernels("off"),
        median_seconds(lambda: reference.adamw_(weights, gradient, step)),
    )
    return Row(name.replace("torch.", ""), times, describe(found))


def logprobs_row(device: torch.device, tokens: int) -> Row:
    """Log-probabilities of so many tokens, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, WIDTH, generator=generator).to(device).requires_grad_()
        for size in (tokens, WORDS)
    )
    targets = torch.randint(0, WORDS, (tokens,), generator=generator).to(device)

    def ours() -> None:
        tile = tokens * WORDS // 4
        linear_logprobs(hidden, weight, None, targets, tile=tile)[0].sum().backward()

    def plain() -> None:
        said = reference.linear_logprobs(
            hidden, weight, None, targets, temperature=1.0, entropy=False
        )
        said[0].sum().backward()

    times = (median_seconds(ours), None, median_seconds(plain))
    name = f"log-probabilities on {device.type}, {tokens} x {WORDS}"
    return Row(name, times, "PyTorch alone, in four tiles")


def on_gpu(device: torch.device, source: str, defines: Mapping[str, str | int]) -> Gpu | str:
    """The GPU with a kernel that is written for GPUs alone, or why there is none."""
    return NO_GPU if device.type == "cpu" else choice.find(device, source, defines)


def generation_row(
    name: str,
    found: Built | Gpu | str,
    by_kernel: Callable[[], object],
    by_definition: Callable[[], object],
) -> Row:
    """An operator of generation, which PyTorch does by the definition where there is no kernel."""
    definition = median_seconds(by_definition)
    ours = definition if isinstance(found, str) else median_seconds(by_kernel)
    return Row(name, (ours, None, definition), describe(found))


def linear_row(dtype: torch.dtype) -> Row:
    """A linear layer of few rows, on the CPU."""
    inputs, outputs = HEADS * HEAD_SIZE, 4 * HEADS * HEAD_SIZE
    found = linear.kernel(dtype, inputs, outputs)
    x, weight = (torch.randn(rows, inputs).to(dtype) for rows in (SEQUENCES, outputs))
    out = torch.empty(SEQUENCES, outputs, dtype=dtype)

    def by_kernel() -> None:
        assert not isinstance(found, str)
        linear.make(*found, x, weight, None, out)()

    name = f"linear layer on cpu, {SEQUENCES} x {inputs} x {outputs}, {name_of(dtype)}"
    state = found if isinstance(found, str) else found[0]
    return generation_row(name, state, by_kernel, lambda: F.linear(x, weight))


def attention_row(device: torch.device, dtype: torch.dtype, tokens: int) -> Row:
    """Attention of a new token of each sequence, by the kernel for CPUs or that for GPUs."""
    query = torch.randn(SEQUENCES, HEADS, HEAD_SIZE).to(device, dtype)
    key, value = (
        torch.randn(SEQUENCES, HEADS, tokens, HEAD_SIZE).to(device, dtype) for _ in range(2)
    )
    lengths = torch.full((SEQUENCES,), tokens, dtype=torch.int32, device=device)
    scores = Scores(lengths=lengths, scaling=HEAD_SIZE**-0.5)
    if device.type == "cpu":
        found = cpu_decode.kernel(dtype, HEAD_SIZE)
    else:
        defines = decode.specialisation(dtype, decode.Shape(1, HEAD_SIZE, dtype.itemsize))
        found = on_gpu(device, "decode_attention", defines)

    def by_kernel() -> Tensor:
        if isinstance(found, Gpu):
            return decode.decode_attention(query, key, value, scores, gpu=found, longest=tokens)
        assert isinstance(found, Built)
        return cpu_decode.decode_attention(
            query,
            key,
            value,
            lengths,
            scaling=scores.scaling,
            sliding_window=None,
            built=found,
        )

    def by_definition() -> Tensor:
        return decode_reference.decode_attention(query, key, value, scores)

    name = f"decode attention on {device.type}, {SEQUENCES} x {tokens}, {name_of(dtype)}"
    return generation_row(name, found, by_kernel, by_definition)


def whole_row(tokens: int) -> Row:
    """Attention of a whole sequence in bf16, forward and backward, on the CPU."""
    made = torch.randn(3, 1, tokens, HEADS, HEAD_SIZE).bfloat16().transpose(2, 3)
    query, key, value = (each.requires_grad_() for each in made.unbind())

    def with_kernels(kernels: Kernels) -> float:
        return median_seconds(
            lambda: causal_attention(query, key, value, kernels=kernels).sum().backward()
        )

    def plain() -> None:
        out = causal_reference.causal_attention(query, key, value, scaling=HEAD_SIZE**-0.5)
        out.sum().backward()

    times = (with_kernels("auto"), with_kernels("off"), median_seconds(plain))
    name = f"attention of whole sequences on cpu, 1 x {tokens}, {name_of(query.dtype)}"
    built = attention_grad.library()
    piece = cpu_decode.piece_of(query.dtype, HEAD_SIZE)
    way = piece if isinstance(piece, str) else attention.library()
    return Row(name, times, f"forward {describe(way)}; backward {describe(built)}")


def append_row(device: torch.device, tokens: int) -> Row:
    """Keys and values of a new token of each sequence, into the cache."""
    shape = (SEQUENCES, HEADS, tokens, HEAD_SIZE)
    cache = (torch.zeros(shape, device=device), torch.zeros(shape, device=device))
    new = torch.randn(2, HEADS, SEQUENCES, HEAD_SIZE).to(device)
    places = torch.arange(0, SEQUENCES * tokens, tokens, device=device)
    found = on_gpu(device, "append", append.SPECIALISATION)

    def by_kernel() -> None:
        assert isinstance(found, Gpu)
        append.append_(cache, (new[0], new[1]), places, gpu=found)

    def by_definition() -> None:
        append_reference.append_(cache, (new[0], new[1]), places)

    name = f"keys and values into the cache on {device.type}"
    return generation_row(name, found, by_kernel, by_definition)


def sample_row(device: torch.device) -> Row:
    """The next token of each sequence."""
    logits = 3 * torch.randn(SEQUENCES, WORDS).to(device)
    numbers = torch.arange(2 * SEQUENCES, device=device).view(2, -1)
    draw = Draw(seed=0, temperature=1.0, top_p=0.9)
    found = on_gpu(device, "sample", sample.specialisation(logits.dtype))

    def by_kernel() -> object:
        assert isinstance(found, Gpu)
        return sample.sample(logits, numbers[0], numbers[1], draw, gpu=found)

    def by_definition() -> object:
        return sampling_reference.sample(logits, numbers[0], numbers[1], draw)

    name = f"sampler on {device.type}, {SEQUENCES} x {WORDS}"
    return generation_row(name, found, by_kernel, by_definition)


def draw_row() -> Row:
    """The next token of each sequence, of log-probabilities that are there, on the CPU."""
    logits = 3 * torch.randn(SEQUENCES, WORDS)
    logprobs = logits.log_softmax(dim=-1)
    numbers = torch.arange(2 * SEQUENCES).view(2, -1)
    keys, positions = numbers.numpy().astype(np.uint64)
    found = cpu_draw.library()

    def by_kernel() -> object:
        assert isinstance(found, Built)
        return cpu_draw.draw(logprobs, keys, positions, seed=0, built=found)

    def by_definition() -> object:
        return sampling_reference.sample(
            logits, numbers[0], numbers[1], Draw(seed=0, temperature=1.0)
        )

    state = found if isinstance(found, Built) else str(found)
    name = f"drawing without cuts on cpu, {SEQUENCES} x {WORDS}"
    return generation_row(name, state, by_kernel, by_definition)


def name_of(dtype: torch.dtype) -> str:
    """As in a sentence."""
    return str(dtype).removeprefix("torch.")


def median_seconds(call: Callable[[], object]) -> float:
    """Of a few calls, after one that doesn't count."""
    call()
    seconds: list[float] = []
    for _ in range(CALLS):
        synchronize()
        started = time.perf_counter()
        call()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def describe(found: Built | Gpu | NotBuiltError | str) -> str:
    """How a kernel came about, or why it didn't."""
    if isinstance(found, (NotBuiltError, str)):
        return f"PyTorch instead: {found}"
    if isinstance(found, Gpu):
        return f"built for {found.architecture}"
    if found.seconds is None:
        return f"kept as {found.path.name if found.path else ''}"
    where = "for this process alone" if found.path is None else f"and kept as {found.path.name}"
    return f"built in {found.seconds:.2f} s by {found.compiler}, {where}"


def table(rows: Sequence[Row]) -> str:
    """One line for each operator."""
    lines = ["| operator | ms | without | reference | on this machine |", "|---|---|---|---|---|"]
    for row in rows:
        times = ("" if each is None else f"{1e3 * each:.2f}" for each in row.times)
        lines.append(f"| {row.operator} | {' | '.join(times)} | {row.state} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Read the options, build, measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.kernels", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--elements", type=int, default=4_000_000, help="of AdamW's vectors")
    parser.add_argument(
        "--tokens", type=int, default=512, help="of the log-probabilities, and of a sequence"
    )
    args = parser.parse_args(argv)
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    rows: list[Row] = []
    for device in devices:
        rows += [adamw_row(device, copy, args.elements) for copy in FORMATS]
        rows.append(logprobs_row(device, args.tokens))
    dtypes = (torch.float32, torch.bfloat16)
    rows.append(whole_row(args.tokens))
    rows += [linear_row(dtype) for dtype in dtypes]
    rows += [attention_row(device, dtype, args.tokens) for device in devices for dtype in dtypes]
    if len(devices) == 1:
        nothing = (None, None, None)
        rows.append(Row("decode attention on cuda", nothing, describe(NO_GPU)))
    rows += [append_row(devices[-1], args.tokens), draw_row(), sample_row(devices[-1])]
    say(f"{torch.get_num_threads()} threads; kernels are kept in {cache_directory()}\n")
    say(table(rows))
    if len(devices) == 1:
        say("\nPyTorch finds no GPU here: nothing was built for one")


if __name__ == "__main__":
    run_main(main)
