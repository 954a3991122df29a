"""The kernels against PyTorch, DeepSpeed and the machine's own memory, side by side.

    python -m benchmarks.kernels [--deepspeed-python PATH] [--parameters 10000000 100000000]
    python -m benchmarks.kernels --quick

AdamW on the CPU. Every way lives in a process of its own, which holds its vectors all the time;
each round visits every way once, so that a slow moment of the machine hits all, from another one
on than the round before. A visit waits until the threads of the last way have gone to sleep, and
times the second of two steps, when its own are awake, as they are after a backward pass. Ratios are
taken within a round. `mixed` is what a mixed-precision step does with bf16 gradients and a clip
coefficient that is known: gradient to fp32 and times the coefficient, AdamW on fp32 masters and
moments, the weights rounded to bf16; `split` has these weights and 16 bits more for the master, to
the same bits; `bf16-moments` and `8bit-moments` are what they say. `stream` moves the same bytes
with next to no arithmetic: the ceiling. DeepSpeed needs an interpreter of an environment that has
it.

Log-probabilities: forward and backward of 2,048 tokens, hidden size 512, 50,272 words, against the
plain way through whole logits; seconds, bytes at the highest moment beyond the inputs, and the
largest error of a gradient, of its largest element, against the plain way in float64.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.engine import call, last_line, show
from benchmarks.memory import peak_bytes_of
from pipeline.engine.host_memory import keep_freed_memory
from pipeline.kernels.adamw import definition as adamw
from pipeline.kernels.adamw.cpu import SOURCE, Variant
from pipeline.kernels.adamw.definition import AdamW, Weights
from pipeline.kernels.adamw.dispatch import adamw_
from pipeline.kernels.logprobs import definition as logprobs
from pipeline.kernels.logprobs.dispatch import linear_logprobs
from pipeline.kernels.toolchain.cpp import CACHE, build

FORMS = (
    *("fp32", "mixed", "mixed-split"),
    *("mixed-split-bf16-moments", "mixed-split-8bit-moments"),
)
BYTES = {
    "fp32": 28,
    "mixed": 28,
    "mixed-split": 26,
    "mixed-split-bf16-moments": 18,
    "mixed-split-8bit-moments": 14,
}
"""That a step must move for each parameter."""

BARS = {
    ("ours-mixed", "deepspeed-mixed"): 2.0,
    ("ours-mixed", "torch-mixed"): 1.8,
    ("ours-mixed", "stream-mixed"): 0.93,
    ("ours-mixed-split", "deepspeed-mixed"): 2.0,
    ("ours-mixed-split", "torch-mixed"): 1.8,
    ("ours-mixed-split", "stream-mixed-split"): 0.93,
    ("ours-mixed-split-bf16-moments", "deepspeed-mixed"): 2.8,
    ("ours-fp32", "torch-fp32"): 1.0,
}
"""How many times as fast as the other one it shall be."""

SETTLE_SECONDS = 0.02
"""Threads of OpenMP stay awake for 5 ms, and hold a core that the next way needs."""

Seconds = dict[str, list[float]]
T = TypeVar("T")


class Worker:
    """A process that takes a step when asked."""

    def __init__(self, python: str, way: str, *, parameters: int, threads: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
        # DeepSpeed builds with the ninja of the interpreter's environment.
        environment["PATH"] = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
        command = [python, "-m", "benchmarks.kernels_worker", "--way", way]
        command += ["--parameters", str(parameters), "--threads", str(threads)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=sys.stderr, text=True, env=environment
        )
        self.way = way

    def wait(self) -> None:
        """Return when it is ready."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == "ready\n":
                return
        raise RuntimeError(f"{self.way} ended with code {self.process.wait()}")

    def step(self) -> float:
        """Seconds of one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        output = self.process.stdout.readline()
        if not output:
            raise RuntimeError(f"{self.way} ended with code {self.process.wait()}")
        return float(output)

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def measure_adamw(args: argparse.Namespace, form: str, *, parameters: int, threads: int) -> Seconds:
    """Seconds of every way, round by round."""
    kind = form.partition("-")[0]  # the others have no splits and no narrower moments
    ways = {f"{name}-{form}": sys.executable for name in ("ours", "stream")}
    ways[f"torch-{kind}"] = sys.executable
    if args.deepspeed_python is not None:
        ways[f"deepspeed-{kind}"] = args.deepspeed_python
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for way, python in ways.items():
            workers[way] = Worker(python, way, parameters=parameters, threads=threads)
            stack.callback(workers[way].close)
        for worker in workers.values():
            worker.wait()
        seconds: Seconds = {way: [] for way in workers}
        for number in range(args.rounds):
            for way in rotated(list(workers), number):
                time.sleep(SETTLE_SECONDS)
                seconds[way].append(workers[way].step())
    return seconds


def rotated(ways: list[T], number: int) -> list[T]:
    """The ways in their order, each round from the next one on."""
    first = number % len(ways)
    return ways[first:] + ways[:first]


def show_adamw(seconds: Seconds, form: str, *, parameters: int, threads: int) -> list[str]:
    """Rows of the table: what it took, and the ratios with their bars."""
    rows: list[str] = []
    ours = f"ours-{form}"
    for way, times in seconds.items():
        median = statistics.median(times)
        ratios = [other / own for other, own in zip(times, seconds[ours], strict=True)]
        bar = BARS.get((ours, way))
        output = "" if way == ours else show(ratios)
        rate = BYTES[form] * parameters / median / 1e9
        moved = f"{rate:.1f}" if way.partition("-")[0] in ("ours", "stream") else ""
        rows.append(
            f"| {parameters // 10**6}M | {threads} | {way} | {1e3 * median:.1f} | {moved} |"
            f" {output} | {'' if bar is None else bar} |"
        )
    return rows


def first_use() -> float:
    """Seconds until a kernel is built and loaded, with nothing kept from before."""
    with tempfile.TemporaryDirectory() as empty:
        before = os.environ.get(CACHE)
        os.environ[CACHE] = empty
        try:
            built = build(SOURCE, Variant(torch.bfloat16, torch.float32, torch.bfloat16).defines)
        finally:
            os.environ.pop(CACHE) if before is None else os.environ.update({CACHE: before})
    assert built.seconds is not None
    return built.seconds


def is_bit_equal(numel: int = 1_000_003) -> bool:
    """Whether three steps in fp32 end in the definition's bits."""
    torch.manual_seed(0)
    first = Weights(*torch.randn(3, numel).abs())
    second = Weights(**{name: each.clone() for name, each in first.tensors().items()})
    for number in range(1, 4):
        step = AdamW(
            lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=number, multiplier=0.37
        )
        gradient = torch.randn(numel)
        adamw_(first, gradient, step, kernels="required")
        adamw.adamw_(second, gradient, step)
    pairs = zip(first.tensors().values(), second.tensors().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def measure_logprobs(args: argparse.Namespace) -> list[str]:
    """Rows of the table."""
    tokens, width, words = (256, 64, 8192) if args.quick else (2048, 512, 50_272)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).requires_grad_()
    weight = (torch.randn(words, width) * width**-0.5).requires_grad_()
    targets = torch.randint(0, words, (tokens,))
    varied, same = torch.randn(tokens), torch.full((tokens,), -1 / tokens)
    tile: dict[str, Any] = {"tile": tokens * words // 12} if args.quick else {}
    rows: list[str] = []
    for name, weights, settings in (
        ("any loss", varied, tile),
        ("uniform", same, {**tile, "uniform": True}),
    ):

        def learn(
            compute: Callable[..., tuple[Tensor, Tensor | None]],
            leaves: Sequence[Tensor],
            weights: Tensor = weights,
            **settings: Any,  # noqa: ANN401
        ) -> list[Tensor | None]:
            for leaf in leaves:
                leaf.grad = None
            output, _ = compute(leaves[0], leaves[1], None, targets, **settings)
            (output * weights).sum().backward()
            return [leaf.grad for leaf in leaves]

        plain: dict[str, Any] = {"temperature": 1.0, "entropy": False}
        exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
        expected = learn(in_float64, exact)
        got = learn(linear_logprobs, (hidden, weight), **settings)
        error = max(
            ((a.double() - b).abs().max() / b.abs().max()).item()
            for a, b in zip(got, expected, strict=True)
            if a is not None and b is not None
        )
        del exact, expected, got
        inputs = hidden.nbytes + weight.nbytes
        peaks: list[float] = []
        for compute, each in ((logprobs.linear_logprobs, plain), (linear_logprobs, settings)):
            hidden.grad = weight.grad = None
            peaks.append(
                peak_bytes_of(lambda: learn(compute, (hidden, weight), **each)) - inputs  # noqa: B023
            )
        times: tuple[list[float], list[float]] = ([], [])
        ways = [
            (times[0], logprobs.linear_logprobs, plain),
            (times[1], linear_logprobs, settings),
        ]
        for number in range(args.rounds // 2 + 1):
            for column, compute, each in rotated(ways, number):
                started = time.perf_counter()
                learn(compute, (hidden, weight), **each)
                column.append(time.perf_counter() - started)
        ratios = [own / other for other, own in zip(*times, strict=True)]
        rows.append(
            f"| {name} | {statistics.median(times[0]):.2f} | {statistics.median(times[1]):.2f} |"
            f" {show(ratios)} | {peaks[0] / 2**20:.0f} | {peaks[1] / 2**20:.0f} |"
            f" 1/{peaks[0] / peaks[1]:.1f} | {error:.1e} |"
        )
    return rows


def in_float64(hidden: Tensor, weight: Tensor, bias: None, targets: Tensor) -> tuple[Tensor, None]:
    """The plain way without rounding to fp32."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return logits.log_softmax(dim=1).gather(1, targets[:, None]).squeeze(1), None


def find_deepspeed(python: str | None) -> str | None:
    """The interpreter, if DeepSpeed's Adam can be had by it."""
    if python is None:
        print("DeepSpeed is left out: --deepspeed-python names no interpreter that has it")
        return None
    program = "from deepspeed.ops.adam import DeepSpeedCPUAdam as Adam; import torch, deepspeed;"
    program += "Adam([torch.nn.Parameter(torch.zeros(8))]);"
    program += "print(deepspeed.__version__, torch.__version__)"
    found = call([python, "-c", program])
    if found.returncode != 0:
        print(f"DeepSpeed is left out: {python} has none ({last_line(found.stderr)})")
        return None
    print("DeepSpeed {} with torch {}".format(*found.stdout.split()[-2:]))
    return python


def main(argv: Sequence[str]) -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed-python", help="interpreter of an environment with DeepSpeed")
    parser.add_argument("--parameters", type=int, nargs="+", default=[10_000_000, 100_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="a million parameters, three rounds")
    parser.add_argument("--skip-logprobs", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("output/kernels.json"))
    args = parser.parse_args(argv)
    if args.quick:
        args.parameters, args.rounds = [1_000_000], 3
    args.deepspeed_python = find_deepspeed(args.deepspeed_python)
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"first use: {first_use():.2f} s; fp32 bit-equal to the definition: {is_bit_equal()}\n")

    print("| parameters | threads | way | ms | GB/s | ours is times as fast | bar |")
    print("|---|---|---|---|---|---|---|")
    results: dict[str, Seconds] = {}
    for parameters in args.parameters:
        for threads in args.threads:
            for form in args.forms:
                size = {"parameters": parameters, "threads": threads}
                seconds = measure_adamw(args, form, **size)
                results[f"{parameters} {threads} {form}"] = seconds
                print("\n".join(show_adamw(seconds, form, **size)), flush=True)

    rows: list[str] = []
    if not args.skip_logprobs:
        torch.set_num_threads(max(args.threads))
        keep_freed_memory()  # as the engine does
        rows = measure_logprobs(args)
        print("\n| loss | plain, s | ours, s | ratio | plain, MiB | ours, MiB | share | error |")
        print("|---|---|---|---|---|---|---|---|")
        print("\n".join(rows))
    print(f"\nload after: {os.getloadavg()[0]:.1f}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "adamw": results,
        "logprobs": rows,
    }
    args.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
