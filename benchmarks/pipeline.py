"""Pipelines side by side: ours and torch.distributed.pipelining's, rows of one length and of many.

    python -m benchmarks.pipeline                  # two stages, on two processes
    python -m benchmarks.pipeline --tensor 2       # of two processes each, which divide layers

A Llama of 27M fp32 parameters in 8 blocks; 8 micro-batches of 2 rows, of 128 tokens or of 16 to
128, drawn with one seed. All systems are in one job and take a step in turn, a thread each; a round
is some steps of each. Shown are the medians over the rounds of the slowest process's seconds for a
step, PyTorch's time as a multiple of ours, and of ours the measured share of waiting beside the
calculated one. The machine must have nothing else to do.
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

ROWS = 16
LENGTHS = {"equal": (128, 128), "ragged": (16, 128)}


def main(argv: Sequence[str]) -> None:
    """Start the job and print its tables; or be one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", choices=[*LENGTHS], nargs="+", default=[*LENGTHS])
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        work(args)
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(2 * args.tensor), "-m", "benchmarks.pipeline"]
        command += [*argv, "--result", str(result)]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        for name, figures in json.loads(result.read_text()).items():
            print(f"\n{name} rows\n")
            print(table(figures))


def work(args: argparse.Namespace) -> None:
    """One process of the job."""
    import torch
    import torch.distributed as dist

    from benchmarks.pipeline_systems import OURS, TORCH, VOCABULARY, Step, ours, torchs
    from pipeline.models.passes import Passes
    from pipeline.parallel.mesh import cut_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    with cut_mesh(replicas=1, pp=2, tp=args.tensor, timeout_seconds=600.0) as mesh:
        for name in args.rows:
            draw = torch.Generator().manual_seed(1)
            least, most = LENGTHS[name]
            lengths = torch.randint(least, most + 1, (ROWS,), generator=draw).tolist()
            lengths[0] = most
            rows = [torch.randint(0, VOCABULARY, (each,), generator=draw) for each in lengths]
            steps: dict[str, Step] = {TORCH: torchs(mesh, rows)}
            passes: dict[str, Passes] = {}
            for system, schedule in OURS.items():
                steps[system], passes[system] = ours(mesh, rows, schedule)
            found[name] = {system: {"seconds": [], "bubble": []} for system in steps}
            for number in range(args.rounds + 1):  # the first warms up
                for system, step in steps.items():
                    seconds, waits = list[float](), list[float]()
                    for _ in range(args.steps):
                        dist.barrier()
                        began = time.perf_counter()
                        step()
                        seconds.append(mesh.world.max(time.perf_counter() - began))
                        if system in passes:
                            waits.append(passes[system].metrics()["bubble"])
                    if number > 0:
                        found[name][system]["seconds"].append(statistics.median(seconds))
                        found[name][system]["bubble"] += [statistics.median(waits or [0.0])]
                if mesh.is_main and number > 0:
                    args.result.write_text(json.dumps(found))
                    print(f"round {number}: {figures_of(found[name])}", flush=True)
            dist.barrier()
    dist.destroy_process_group()


def figures_of(systems: dict[str, dict[str, list[float]]]) -> str:
    """Of the last round: milliseconds of a step, and the share of waiting."""
    return ", ".join(
        f"{system} {1e3 * each['seconds'][-1]:.0f} ms ({each['bubble'][-1]:.3f})"
        for system, each in systems.items()
    )


def table(figures: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: one row for each system."""
    from benchmarks.pipeline_systems import CHUNKS, MICRO_BATCHES, OURS, TORCH
    from pipeline.parallel.schedules import bubble

    columns = ["system", "ms a step", "range", f"{TORCH} / it", "waiting", "calculated"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for system, each in figures.items():
        times = [1e3 * seconds for seconds in each["seconds"]]
        theirs = figures[TORCH]["seconds"]
        ratio = statistics.median(a / b for a, b in zip(theirs, each["seconds"], strict=True))
        row = [system, f"{statistics.median(times):,.0f}"]
        row += [f"{min(times):,.0f} to {max(times):,.0f}", f"{ratio:.2f}"]
        if system in OURS:
            chunks = CHUNKS if system == "interleaved" else 1
            row.append(f"{statistics.median(each['bubble']):.3f}")
            row.append(f"{bubble(OURS[system], 2, MICRO_BATCHES, chunks):.3f}")
        else:
            row += ["", ""]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
