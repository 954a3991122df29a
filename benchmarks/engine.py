"""The training engine against DDP, FSDP2 and DeepSpeed ZeRO: speed and memory.

    pip install deepspeed           # in a separate environment, with the same torch
    python -m benchmarks.engine --deepspeed-python PATH [--precisions bf16 fp32] [--rounds 3]
    python -m benchmarks.engine --quick

Two single-threaded gloo processes train a Llama with 25.3M parameters on the same token ids, with a
micro-batch of 4 sequences of 256 tokens per process and step. Every system runs in new processes,
and each round runs every system once, so that a slowdown of the machine affects all. Tokens per
second are those of the median step in the median round; ratios are computed within each round, and
their median is shown.

CPU ms is one process's processor time per step, over all its threads and including polling: the
figure to compare if the machine is shared.

Bytes are those of the tensors on the process that uses the most: alive between steps, and at the
peak of a step (see `benchmarks/memory.py`). Other systems keep their defaults except those set in
`benchmarks/engine_systems.py`: in bf16, DDP, FSDP2 and DeepSpeed add gradients in bf16, and the
engine adds them in fp32. The engine keeps freed memory; set MALLOC_MMAP_MAX_=0 and
MALLOC_TRIM_THRESHOLD_=100000000000 to make all systems do so.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engine_systems import (
    DDP,
    DEEPSPEED,
    FSDP2,
    OURS,
    SYSTEMS,
    Step,
    build_model,
    make_step,
)
from benchmarks.memory import live_bytes, measure_peak_bytes, peak_rss, reset_peak_rss

WARM_UP = 3
"""Number of steps before timing starts."""

Rounds = dict[str, list[dict[str, float]]]
"""Metrics of every round, by system."""

MIB = 2**20

IMPORT_DEEPSPEED = "import deepspeed, torch; print(deepspeed.__version__, torch.__version__)"
BUILD_ADAM = "from deepspeed.ops.adam import DeepSpeedCPUAdam as Adam; import torch;" + (
    "Adam([torch.nn.Parameter(torch.zeros(8))])"
)


def make_batches(args: argparse.Namespace, rank: int) -> list[Tensor]:
    """Return random token ids, the same for every system."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (args.steps + WARM_UP + 2, args.micro_batch, args.sequence)
    vocabulary = 512 if args.tiny else 12_288
    return list(torch.randint(0, vocabulary, shape, generator=generator))


def measure(step: Step, ids: list[Tensor]) -> dict[str, float]:
    """Time the steps, then measure the bytes of tensors after one step and during another."""
    for batch in ids[:WARM_UP]:
        step(batch)
    reset_peak_rss()
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    for batch in ids[WARM_UP:-2]:
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        step(batch)
        cpu_seconds.append(time.process_time() - cpu_start)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    rss = peak_rss()
    step(ids[-2])
    live = live_bytes()
    peak = measure_peak_bytes(lambda: step(ids[-1]))
    return {
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(cpu_seconds),
        "bytes": live,
        "peak_bytes": peak,
        "peak_rss": rss,
    }


def run_worker(args: argparse.Namespace) -> None:
    """Measure one system on the processes that torchrun started; rank 0 writes the result."""
    torch.set_num_threads(1)
    if args.system in DEEPSPEED:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    model = build_model(tiny=args.tiny)
    step = make_step(args.system, model, args.precisions[0], args.deepspeed_adam)
    metrics = measure(step, make_batches(args, dist.get_rank()))
    gathered: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, metrics)
    if dist.get_rank() == 0:
        tokens = args.micro_batch * args.sequence * len(gathered)
        worst = {key: max(row[key] for row in gathered) for key in metrics}
        args.output.write_text(json.dumps({"tokens": tokens / worst["seconds"], **worst}))
    dist.barrier()
    # Skip interpreter shutdown, where gloo's threads sometimes abort.
    sys.stdout.flush()
    os._exit(0)


def find_deepspeed(python: str | None) -> tuple[str, str] | None:
    """Return the versions and the Adam to use, or None if DeepSpeed is missing."""
    if python is None:
        print("skipping DeepSpeed: set --deepspeed-python to a Python interpreter that has it")
        return None
    imported = run_command([python, "-c", IMPORT_DEEPSPEED])
    if imported.returncode != 0:
        print(f"skipping DeepSpeed: {python} can't import it ({last_line(imported.stderr)})")
        return None
    versions = "DeepSpeed {} with torch {}".format(*imported.stdout.split()[-2:])
    build = run_command([python, "-c", BUILD_ADAM])
    if build.returncode != 0:
        print(f"using torch's AdamW: DeepSpeedCPUAdam can't be built ({last_line(build.stderr)})")
        return versions, "torch"
    return versions, "deepspeed"


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a fixed environment; in a different one, DeepSpeed would be rebuilt."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    # DeepSpeed builds with the ninja from the interpreter's environment.
    environment["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def last_line(text: str) -> str:
    """Return the last line that is not blank, or `no output`."""
    return (text.strip().splitlines() or ["no output"])[-1]


def run(
    args: argparse.Namespace, system: str, precision: str, adam: str
) -> dict[str, float] | None:
    """Run one system once; if it fails, print the reason and return None."""
    python = args.deepspeed_python if system in DEEPSPEED else sys.executable
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [python, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(args.processes), "-m", "benchmarks.engine"]
        command += ["--system", system, "--precisions", precision, "--deepspeed-adam", adam]
        command += ["--steps", str(args.steps), "--micro-batch", str(args.micro_batch)]
        command += ["--sequence", str(args.sequence), "--output", str(result)]
        command += ["--tiny"] if args.tiny else []
        process = run_command(command)
        if process.returncode != 0:
            print(f"skipping {system} in {precision}: it failed with\n{process.stderr}", flush=True)
            return None
        return json.loads(result.read_text())


def compute_ratios(rounds: Rounds, system: str, peer: str, *, key: str = "tokens") -> list[float]:
    """Return the ratio of a system's value to the peer's in each round."""
    pairs = zip(rounds.get(system, []), rounds.get(peer, []), strict=False)
    return [a[key] / b[key] for a, b in pairs]


def format_range(values: list[float]) -> str:
    """Format the median and range of the values."""
    median = f"{statistics.median(values):.2f}" if values else ""
    return f"{median} ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else median


def format_table(rounds: Rounds) -> str:
    """Format a Markdown table with a row per system, including its ratios to other systems."""
    peer_stage = "DeepSpeed's stage"
    columns = ["system", "tokens/s", "range", "CPU ms", "MiB live", "MiB peak", "MiB RSS peak"]
    columns += [f"x {peer}" for peer in (*DDP, *FSDP2)] + [
        f"x {peer_stage}",
        f"bytes / {peer_stage}",
    ]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for system, metrics in rounds.items():
        tokens = [r["tokens"] for r in metrics]
        sizes = [
            statistics.median(r[key] for r in metrics) / MIB
            for key in ("bytes", "peak_bytes", "peak_rss")
        ]
        row = [system, f"{statistics.median(tokens):,.0f}"]
        row.append(f"{min(tokens):,.0f} to {max(tokens):,.0f}")
        row.append(f"{1e3 * statistics.median(r['cpu_seconds'] for r in metrics):,.0f}")
        row += [*(f"{size:,.0f}" for size in sizes)]
        row += [format_range(compute_ratios(rounds, system, peer)) for peer in (*DDP, *FSDP2)]
        peer = system.replace("ours", "deepspeed") if system in OURS else ""
        row.append(format_range(compute_ratios(rounds, system, peer)))
        row.append(format_range(compute_ratios(rounds, system, peer, key="bytes")))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def compare(args: argparse.Namespace, precision: str, adam: str, systems: list[str]) -> Rounds:
    """Run every system once per round."""
    rounds: Rounds = {system: [] for system in systems}
    for number in range(args.rounds):
        for system in list(rounds):
            load = os.getloadavg()[0]
            metrics = run(args, system, precision, adam)
            if metrics is None:
                del rounds[system]
                continue
            rounds[system].append({**metrics, "load": load})
            print(
                f"round {number + 1}, {precision}, {system}: {metrics['tokens']:,.0f} tokens/s,"
                f" {metrics['bytes'] / MIB:.0f} MiB, load before {load:.2f}",
                file=sys.stderr,
                flush=True,
            )
    return rounds


def main(argv: Sequence[str]) -> None:
    """Parse the options, run the benchmark, and print the tables."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed-python", help="interpreter of an environment with DeepSpeed")
    parser.add_argument("--deepspeed-adam", choices=["deepspeed", "torch"], help="default: detect")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS)
    parser.add_argument("--precisions", nargs="+", choices=["bf16", "fp32"], default=["bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--tiny", action="store_true", help="use a model with 0.1M parameters")
    parser.add_argument("--quick", action="store_true", help="run one round of five steps")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.system:
        run_worker(args)
    if args.quick:
        args.rounds, args.steps = 1, 5
    selected = list(args.systems or SYSTEMS)
    deepspeed = find_deepspeed(args.deepspeed_python) if set(selected) & set(DEEPSPEED) else None
    adam = args.deepspeed_adam or (deepspeed[1] if deepspeed else "torch")
    if deepspeed is None:
        selected = [system for system in selected if system not in DEEPSPEED]
    else:
        print(f"{deepspeed[0]}, using Adam from {adam}")
    for precision in args.precisions:
        # fp32 weights have no separate master weights, so both variants are the same.
        systems = [s for s in selected if precision == "bf16" or s != "ddp-bf16"]
        rounds = compare(args, precision, adam, systems)
        print(f"\n{precision}\n\n{format_table(rounds)}\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
