"""One system of `benchmarks.engine` on the processes that torchrun started; see there."""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engine_systems import DEEPSPEED, Step, build_model, make_step
from benchmarks.memory import live_bytes, peak_bytes_of, peak_rss, reset_peak_rss

WARM_UP = 3
"""Steps before the clock starts."""


def batches(args: argparse.Namespace, rank: int) -> list[Tensor]:
    """Random token ids, the same in every system."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (args.steps + WARM_UP + 2, args.micro_batch, args.sequence)
    vocabulary = 512 if args.tiny else 12_288
    return list(torch.randint(0, vocabulary, shape, generator=generator))


def measure(step: Step, ids: list[Tensor]) -> dict[str, float]:
    """Time the steps; then weigh the tensors after one and during one."""
    for batch in ids[:WARM_UP]:
        step(batch)
    reset_peak_rss()
    seconds: list[float] = []
    processor: list[float] = []
    for batch in ids[WARM_UP:-2]:
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        step(batch)
        processor.append(time.process_time() - used)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    rss = peak_rss()
    step(ids[-2])
    after = live_bytes()
    peak = peak_bytes_of(lambda: step(ids[-1]))
    return {
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(processor),
        "bytes": after,
        "peak_bytes": peak,
        "peak_rss": rss,
    }


def main(argv: Sequence[str]) -> None:
    """Run on one process; rank 0 writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", required=True)
    parser.add_argument("--precision", choices=["bf16", "fp32"], required=True)
    parser.add_argument("--adam", choices=["deepspeed", "torch"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--sequence", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.system in DEEPSPEED:
        import deepspeed  # pyright: ignore[reportMissingImports]

        deepspeed.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    step = make_step(args.system, build_model(tiny=args.tiny), args.precision, args.adam)
    ids = batches(args, rank)
    figures = measure(step, ids)
    everyone: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, figures)
    if rank == 0:
        tokens = args.micro_batch * args.sequence * len(everyone)
        worst = {key: max(each[key] for each in everyone) for key in figures}
        args.result.write_text(json.dumps({"tokens": tokens / worst["seconds"], **worst}))
    dist.barrier()
    # Not by the interpreter's own end: gloo's threads now and then abort there, with all work done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
