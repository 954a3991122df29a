"""Benchmark AdamW on the CPU against PyTorch's and, if installed, DeepSpeed's.

    python -m benchmarks.kernels [--parameters 10000000 100000000] [--rounds 24]
    python -m benchmarks.kernels --quick

Each round runs every implementation once, starting with a different one, and times the second of
two steps. `mixed` is an optimizer step in mixed precision, which scales the gradient by a clip
coefficient, runs AdamW on fp32 master weights and moments, and rounds the weights to bf16; `split`
stores the master weights as these bf16 weights and 16 additional bits; `bf16-moments` stores the
Adam moments in bf16. Ratios are computed within a round.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipeline.kernels.adamw import AdamW, FlatAdamW, Shard, Weights, new_moments, split_master
from pipeline.kernels.host_allocator import keep_freed_memory

BYTES = {"fp32": 28, "mixed": 30, "mixed-split": 28, "mixed-split-bf16-moments": 20}
"""Bytes that a step must read and write for each parameter."""

SETTINGS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BF16 = torch.bfloat16

Step = Callable[[], object]


def our_step(numel: int, form: str) -> Step:
    """Return an AdamW step of our kernel in the variant `form`."""
    mixed, split = "mixed" in form, "split" in form
    moments = BF16 if "bf16-moments" in form else torch.float32
    master, low_bits = torch.randn(numel), None
    if split:
        master, low_bits = split_master(master)
    weights = Weights(
        master,
        **new_moments(torch.zeros(numel), moments),
        copy=torch.zeros(numel, dtype=BF16) if mixed and not split else None,
        low_bits=low_bits,
    )
    gradient = torch.randn(numel)
    step = AdamW(**SETTINGS, step=3)
    shard = Shard(weights=weights, gradient=gradient, lr=1.0, weight_decay=step.weight_decay)
    return functools.partial(FlatAdamW().step, [shard], step, kernels="required")


def composed_step(numel: int, form: str, make: Callable[..., torch.optim.Optimizer]) -> Step:
    """Return an optimizer's step; if mixed, it also scales the gradient and rounds weights."""
    param = nn.Parameter(torch.randn(numel))
    optimizer = make([param], **SETTINGS)
    param.grad = torch.randn(numel)
    weights = torch.zeros(numel, dtype=BF16)

    @torch.no_grad()
    def mixed() -> None:
        assert param.grad is not None
        param.grad.mul_(1.0)  # repeated scaling by less would produce denormals
        optimizer.step()
        weights.copy_(param)

    return mixed if "mixed" in form else optimizer.step


def torch_adamw(params: list[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:  # noqa: ANN401
    """Create PyTorch's fused AdamW."""
    return torch.optim.AdamW(params, **settings, fused=True)


@functools.cache
def deepspeed_adam() -> Callable[..., torch.optim.Optimizer] | None:
    """Return DeepSpeedCPUAdam, or None if it isn't installed or can't be compiled."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([nn.Parameter(torch.zeros(8))])
    except Exception as error:  # noqa: BLE001
        print(f"skipping DeepSpeed: {type(error).__name__}: {error}")
        return None
    return DeepSpeedCPUAdam


def measure_adamw(form: str, *, parameters: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every implementation in each round."""
    steps = {
        "ours": our_step(parameters, form),
        "torch": composed_step(parameters, form, torch_adamw),
    }
    if (adam := deepspeed_adam()) is not None:
        steps["deepspeed"] = composed_step(parameters, form, adam)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-1, rounds):
        first = number % len(steps)
        for name in [*steps][first:] + [*steps][:first]:
            steps[name]()
            started = time.perf_counter()
            steps[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def show_ratios(slow: Sequence[float], fast: Sequence[float]) -> str:
    """Format the median and range of the ratios within rounds."""
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main(argv: Sequence[str]) -> None:
    """Run the benchmarks and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=[10_000_000, 100_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--forms", nargs="+", choices=BYTES, default=list(BYTES))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="use 1M parameters and three rounds")
    args = parser.parse_args(argv)
    if args.quick:
        args.parameters, args.rounds = [1_000_000], 3
    keep_freed_memory()  # like the engine
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| parameters | threads | form | implementation | ms | GB/s | ours is x times as fast |")
    print("|---|---|---|---|---|---|---|")
    for parameters in args.parameters:
        for threads in args.threads:
            torch.set_num_threads(threads)
            for form in args.forms:
                seconds = measure_adamw(form, parameters=parameters, rounds=args.rounds)
                for name, times in seconds.items():
                    median = statistics.median(times)
                    rate = f"{BYTES[form] * parameters / median / 1e9:.1f}"
                    ratio = "" if name == "ours" else show_ratios(times, seconds["ours"])
                    cells = (f"{parameters // 10**6}M", threads, form, name, f"{1e3 * median:.1f}")
                    print("| " + " | ".join(map(str, (*cells, rate, ratio))) + " |", flush=True)
    print(f"\nload after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
