"""What the phases of `benchmarks.kernels_gpu` share."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.kernels.toolchain.gpu import Gpu
from pipeline.kernels.toolchain.nvrtc import Nvrtc

REPEATS = 20

HEADS = {
    "OPT-1.3B": (32, 32, 64),
    "Llama-7B": (32, 32, 128),
    "Llama-3-8B": (32, 8, 128),
    "Llama-3-70B, an eighth": (8, 1, 128),
}
"""Query heads, heads of keys, head size."""


@dataclass
class Bench:
    """A device with its kernels, and what was found so far."""

    gpu: Gpu
    nvrtc: Nvrtc
    tiny: bool
    output: Path
    memory: Callable[[], AbstractContextManager[None]] = nullcontext
    """To run kernels inside."""

    copy_bandwidth: float = 0.0
    """Bytes a second of a copy, read and written."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    deadline: float = 0.0

    def record(self, phase: str, **figures: object) -> None:
        """Keep a line."""
        row = {"phase": phase, **figures}
        self.rows.append(row)
        with (self.output / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def in_time(self, phase: str, cases: Sequence[Any]) -> Iterator[Any]:
        """The cases, until the phase's time is over."""
        for number, case in enumerate(cases):
            if time.monotonic() > self.deadline:
                self.record(phase, left_off=len(cases) - number)
                return
            yield case

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median seconds of one of the calls, which are alike but for their buffers."""
        for call in calls:
            call()
        if self.gpu.device.type != "cuda":
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) / len(calls)
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
