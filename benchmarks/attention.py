"""Attention of whole sequences in bf16 on the CPU, by our kernels and by PyTorch.

    python -m benchmarks.attention [--rounds 15] [--threads 2]

Each round runs both sides of each shape, one after the other, on queries, keys and values as a
model has them, token after token. A figure is the median over rounds, a ratio the median of those
within rounds, with the 10th and 90th percentile.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

SHAPES = ((8, 6, 128, 48), (8, 6, 192, 48), (4, 8, 512, 64), (1, 8, 2048, 128))
"""Sequences, heads, tokens, numbers of a head: the first two are a rollout of 15M parameters."""

Seconds = dict[str, list[float]]


def measure(shape: tuple[int, int, int, int], rounds: int) -> dict[str, Seconds]:
    """Seconds of each round, by direction and side."""
    import torch

    from pipeline.kernels.causal_attention.dispatch import causal_attention

    batch, heads, tokens, size = shape
    made = torch.randn(4, batch, tokens, heads, size).bfloat16().transpose(2, 3)
    query, key, value = (each.detach().requires_grad_() for each in made[:3])
    figures: dict[str, Seconds] = {
        way: {"ours": [], "PyTorch": []} for way in ("forward", "backward")
    }
    for number in range(rounds + 1):
        for side, kernels in (("ours", "required"), ("PyTorch", "off")):
            started = time.perf_counter()
            out = causal_attention(query, key, value, kernels=kernels)
            between = time.perf_counter()
            torch.autograd.grad(out, (query, key, value), made[3])
            ended = time.perf_counter()
            if number > 0:
                figures["forward"][side].append(between - started)
                figures["backward"][side].append(ended - between)
    return figures


def row(shape: Sequence[int], way: str, seconds: Seconds) -> str:
    """A line of the table."""
    ratios = sorted(
        theirs / ours for ours, theirs in zip(seconds["ours"], seconds["PyTorch"], strict=True)
    )
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    times = (f"{1e3 * statistics.median(seconds[side]):.2f} ms" for side in ("PyTorch", "ours"))
    name = " x ".join(map(str, shape))
    ratio = f"{statistics.median(ratios):.2f} x ({low:.2f} to {high:.2f})"
    return f"| {name} | {way} | {' | '.join(times)} | {ratio} |"


def main(argv: Sequence[str]) -> None:
    """Measure and print the table."""
    description: Any = __doc__
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(args.threads)
    print("| sequences x heads x tokens x size | way | PyTorch | ours | as fast |")
    print("|---|---|---|---|---|")
    for shape in SHAPES:
        for way, seconds in measure(shape, args.rounds).items():
            print(row(shape, way, seconds), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
