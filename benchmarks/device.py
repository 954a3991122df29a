"""Utilities of the GPU benchmarks: result rows, timing, and the device's peak rates.

    python -m benchmarks.device                 # software and peak rates of the device
    python -m benchmarks.device --show FILE     # rows as a table; exit code 1 if one is not ok

A row is a line of JSON on standard output, and in the file named by the environment variable ROWS.
"""

import json
import logging
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from pipeline.kernels.build import cache_directory
from pipeline.kernels.gpu import get_gpu
from pipeline.system.logs import configure_logging

ROWS = "ROWS"
REPEATS = 20
FALLBACKS = ("using PyTorch instead", "attention runs per sequence", "decoding in eager mode")
"""Prefixes of messages that report a missing kernel."""

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")

Row = dict[str, Any]


def emit(part: str, *, ok: bool = True, **figures: Any) -> None:  # noqa: ANN401
    """Print a row, and append it to the file named by ROWS, if set."""
    line = json.dumps({"part": part, "ok": ok, **figures}, default=str)
    print(line, flush=True)
    if ROWS in os.environ:
        with Path(os.environ[ROWS]).open("a") as file:
            file.write(line + "\n")


@contextmanager
def report_errors(part: str, **figures: Any) -> Iterator[None]:  # noqa: ANN401
    """Context manager that reports an error as a failed row and continues.

    CUDA errors are re-raised, since the process can't use the GPU after one.
    """
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        emit(part, ok=False, **figures, error=f"{type(error).__name__}: {error}"[:400])
        if "CUDA error" in str(error):
            raise


class Fallbacks(logging.Handler):
    """Collects messages about missing kernels, and configures logging as a training step does."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        configure_logging(is_main=True)
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Record the message if it reports a missing kernel."""
        if record.getMessage().startswith(FALLBACKS):
            self.messages.append(record.getMessage())

    def report(self) -> None:
        """Emit a row with the CUDA kernels that this process loaded and those that were missing."""
        kernels = get_gpu(DEVICE)._kernels if GPU else ()  # noqa: SLF001  # only for this row
        loaded = sorted({entry for _, entry, _ in kernels})
        ok = not GPU or (bool(loaded) and not self.messages)
        emit("kernels used", ok=ok, loaded=loaded, fallbacks=self.messages)


def synchronize() -> None:
    """Synchronize with the GPU, if there is one."""
    if GPU:
        torch.cuda.synchronize()


def pop_peak_bytes() -> int:
    """Return the peak bytes that PyTorch has reserved since the last call, or 0 without a GPU."""
    peak = torch.cuda.max_memory_reserved() if GPU else 0
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    return peak


def time_call(call: Callable[[], object], *, count: int = 1) -> float:
    """Return the mean seconds per call over `count` calls, including the GPU's work."""
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return (time.perf_counter() - start) / count


def median_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median seconds per call over calls that differ only in the memory they use.

    On a GPU, all calls are replayed as one CUDA graph and timed with CUDA events.
    """
    for call in calls:
        call()
    if not GPU:
        return statistics.median(time_call(call) for call in calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def profile(call: Callable[[], object], *, count: int) -> Row:
    """Return seconds per call and, on a GPU, its busy seconds and the slowest kernels' times."""
    seconds = time_call(call, count=count)
    if not GPU:
        return {"seconds": seconds}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        time_call(call, count=count)
    times = {event.key[:60]: event.self_device_time_total for event in trace.key_averages()}
    top = sorted(times, key=lambda name: -times[name])[:8]
    busy = sum(times.values()) / 1e6 / count
    return {
        "seconds": seconds,
        "busy": busy,
        "top_ms": {name: times[name] / 1e3 / count for name in top},
    }


def copy_bandwidth() -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    source = torch.randn(1 << (30 if GPU else 18), device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds([lambda: target.copy_(source)])


def print_rows(file: Path) -> int:
    """Print a line for each row; return 1 if any row is not ok, otherwise 0."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        names = [name for name in row if name not in ("part", "ok")]
        values = (f"{row[n]:.4g}" if isinstance(row[n], float) else row[n] for n in names)
        text = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
        print(f"{'ok' if row['ok'] else 'WRONG':5} {row['part']}: {text}"[:220])
    num_ok = sum(row["ok"] for row in rows)
    print(f"{num_ok} of {len(rows)} rows are ok")
    return int(num_ok < len(rows))


def main(argv: Sequence[str]) -> int:
    """Report software versions and peak rates, or print the rows of a file."""
    if argv[:1] == ["--show"]:
        return print_rows(Path(argv[1]))
    kernels = cache_directory()
    side = 8192 if GPU else 256
    left, right = torch.randn(2, side, side, device=DEVICE).bfloat16()
    emit(
        "card",
        card=torch.cuda.get_device_name() if GPU else "no GPU",
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=platform.python_version(),
        compiled_kernels=len(list(kernels.glob("*.cubin"))) if kernels else 0,
        copy_TBs=copy_bandwidth() / 1e12,
        product_TFLOPs=2 * side**3 / median_seconds([lambda: left @ right]) / 1e12,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
