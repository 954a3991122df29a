"""The plan's peak of each process beside that of a real step, by how processes share a model.

    python -m benchmarks.plan_by_rank [--cases NAME ...] [--hidden 512] [--output FILE]

A Llama of 8 blocks, 8,192 words and, with the default width, 33M fp32 parameters takes two steps of
8 micro-batches of 2 rows of 256 tokens on each pipeline, over gloo, each case in a job of its own.
Shown for each rank is what the plan has for the training phase, less what an engine doesn't hold
(the interpreter, the copy of the best weights), and the most bytes that tensors took at any moment
of the second step. These are counted block by block in place of `malloc` and `free`
(`benchmarks/heap.py`); the resident set would be of what the C library keeps of freed memory too.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.heap import counting
from benchmarks.plan_by_rank_worker import CASES, Peak, Shape

MIB = 2**20


def peaks_of(name: str, shape: Shape) -> list[Peak]:
    """Of a case's processes, in rank order."""
    count = CASES[name].processes
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(count), "-m", "benchmarks.plan_by_rank_worker"]
        command += ["--case", name, "--shape", json.dumps(asdict(shape)), "--result", scratch]
        subprocess.run(command, env={**counting(), "OMP_NUM_THREADS": "1"}, check=True)
        found = [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(count)]
    return [Peak(**each) for each in found]


def lines_of(name: str, peaks: Sequence[Peak]) -> list[str]:
    """Markdown: a row for each rank."""
    return [
        f"| {name} | {CASES[name].stage} | {rank} | {peak.planned / MIB:,.1f}"
        f" | {peak.measured / MIB:,.1f} | {peak.planned / peak.measured:.3f} |"
        for rank, peak in enumerate(peaks)
    ]


def main(argv: Sequence[str]) -> None:
    """Run the cases, print the table, write everything."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--output", type=Path, default=Path("output/plan_by_rank.json"))
    args = parser.parse_args(argv)
    print("| processes' shares | ZeRO | rank | planned, MiB | measured, MiB | ratio |")
    print(f"|{'---|' * 6}")
    found: dict[str, list[dict[str, float]]] = {}
    for name in args.cases:
        peaks = peaks_of(name, Shape(hidden=args.hidden))
        found[name] = [asdict(peak) for peak in peaks]
        print("\n".join(lines_of(name, peaks)), flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
