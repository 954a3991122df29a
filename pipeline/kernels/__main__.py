"""`python -m pipeline.kernels`: what is built, what PyTorch does instead and why, and how fast.

Times are medians of a few calls on the threads that PyTorch uses, in milliseconds; the reference is
the definition in `pipeline/kernels/reference.py`, and `without` what runs where there is no kernel.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pipeline.cli import run_main, say
from pipeline.config import Kernels
from pipeline.kernels import reference
from pipeline.kernels.adam import adamw_, find
from pipeline.kernels.cpu.build import Built, NotBuiltError, cache_directory
from pipeline.kernels.cuda.gpu import Gpu
from pipeline.kernels.logprobs import linear_logprobs
from pipeline.kernels.reference import AdamW, Weights

CALLS = 5
FORMATS = (None, torch.bfloat16, torch.float16)
"""Of the weights; None is fp32, which are their own masters."""

WIDTH, WORDS = 64, 32_768


@dataclass(frozen=True)
class Row:
    """An operator on this machine."""

    operator: str
    times: tuple[float, float | None, float]
    """With the kernel, without it, and by the definition, in seconds."""

    state: str


def adamw_row(device: torch.device, copy: torch.dtype | None, elements: int) -> Row:
    """AdamW as the engine uses it, for weights in this format."""
    found = find(device, copy=copy)
    generator = torch.Generator().manual_seed(0)
    master, gradient = torch.randn(2, elements, generator=generator).to(device)
    exp_avg, exp_avg_sq = torch.zeros(2, elements, device=device)
    out = None if copy is None else torch.empty(elements, dtype=copy, device=device)
    weights = Weights(master, exp_avg, exp_avg_sq, out)
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


def median_seconds(call: Callable[[], None]) -> float:
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


def describe(found: Built | Gpu | NotBuiltError) -> str:
    """How a kernel came about, or why it didn't."""
    if isinstance(found, NotBuiltError):
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
    parser.add_argument("--tokens", type=int, default=512, help="of the log-probabilities")
    args = parser.parse_args(argv)
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    rows: list[Row] = []
    for device in devices:
        rows += [adamw_row(device, copy, args.elements) for copy in FORMATS]
        rows.append(logprobs_row(device, args.tokens))
    say(f"{torch.get_num_threads()} threads; kernels are kept in {cache_directory()}\n")
    say(table(rows))
    if len(devices) == 1:
        say("\nPyTorch finds no GPU here: nothing was built for one")


if __name__ == "__main__":
    run_main(main)
