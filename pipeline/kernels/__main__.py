"""`python -m pipeline.kernels`: what is built, what PyTorch does instead and why, and how fast.

Times are medians of a few calls on the threads that PyTorch uses, in milliseconds; the reference is
the operator's definition in PyTorch, and `without` what runs where there is no kernel if that is
something else. What is timed is in the `cases.py` of each operator.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from pipeline.cli import run_main, say
from pipeline.command import read_command
from pipeline.installation import MODULE
from pipeline.kernels.operators import cases_of, operators
from pipeline.kernels.timing import Sizes, Timed
from pipeline.kernels.toolchain.cache import cache_directory
from pipeline.kernels.toolchain.levels import table

CALLS = 5


def row(timed: Timed) -> str:
    """A line of the table."""
    definition = median_seconds(timed.definition)
    ours = definition if timed.ours is None else median_seconds(timed.ours)
    times = (ours, median_seconds(timed.without), definition)
    cells = ("" if each is None else f"{1e3 * each:.2f}" for each in times)
    return f"| {timed.name} | {' | '.join(cells)} | {timed.state} |"


def median_seconds(call: Callable[[], object] | None) -> float | None:
    """The median of a few calls, after one that doesn't count."""
    if call is None:
        return None
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


def main(argv: Sequence[str]) -> None:
    """Read the options, build, measure and print."""
    sizes = read_command(
        Sizes,
        argv,
        usage=f"{MODULE} pipeline.kernels [--SETTING VALUE ...]",
        about="What is built, what PyTorch does instead and why, and how fast each operator is.",
    )
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    rows = ["| operator | ms | without | reference | on this machine |", "|---|---|---|---|---|"]
    for name in operators():
        rows += [row(each) for each in cases_of(name).timed(devices, sizes)]
    say(f"{torch.get_num_threads()} threads; kernels are kept in {cache_directory()}\n")
    say("\n".join([*table(), "", *rows]))
    if len(devices) == 1:
        say("\nPyTorch finds no GPU here: nothing was built for one")


if __name__ == "__main__":
    run_main(main)
