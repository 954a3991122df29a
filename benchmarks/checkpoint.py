"""Saving and loading a training state: against torch's own asynchronous save, and the disk itself.

    python -m benchmarks.checkpoint [--rounds 7] [--directory DIR]
    python -m benchmarks.checkpoint --quick

Two processes hold half each of the state of 100M parameters: fp32 masters and two moments, 1.2 GB
in 300 tensors. Every round visits each of these once, so that a slow minute of the machine hits
all; a ratio is taken within each round, and its median is shown:

    blocked   seconds until `CheckpointWriter.save`, or `torch.distributed.checkpoint.async_save`,
              has returned and training may go on: of the slower process
    save      from the call until the checkpoint is on the disk, CRCs, manifest and rename included;
              beside it the same bytes written from memory by one thread of each process, then
              flushed: the disk's own rate
    load      every byte verified, then read into tensors, after the system has forgotten the files;
              beside it the same bytes just read

The first save of each is shown on its own: it may pay for memory that later ones find ready.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

Round = dict[str, float]

RATIOS = {
    "blocked, of async_save's": ("blocked", "blocked_dcp", 0.65),
    "save, of the disk's own write": ("save", "write", 1.5),
    "load, of the disk's own read": ("load", "read", 1.5),
}
"""By name: which figure, of which other, and the bar it must stay below."""

SECONDS = {
    "blocked": "training blocked by a save",
    "blocked_dcp": "training blocked by torch's async_save",
    "save": "save, until it is on the disk",
    "save_dcp": "torch's async_save, until its files are written (not flushed)",
    "write": "the same bytes written and flushed",
    "load": "load: verify and read",
    "read": "the same bytes read",
}


def run(args: argparse.Namespace) -> list[Round]:
    """The figures of every round, the first one of all included."""
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(args.processes), "-m", "benchmarks.checkpoint_worker"]
        command += ["--parameters", str(args.parameters), "--rounds", str(args.rounds + 1)]
        command += ["--directory", scratch, "--result", str(result)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment)
        return json.loads(result.read_text())


def show(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table(rounds: Sequence[Round]) -> str:
    """Markdown: seconds, then ratios with their bars."""
    first, *later = rounds
    lines = ["| seconds | median (range) | first |", "|---|---|---|"]
    lines += [
        f"| {meaning} | {show([each[name] for each in later])} | {first[name]:.3f} |"
        for name, meaning in SECONDS.items()
    ]
    lines += ["", "| ratio | median (range) | bar | first |", "|---|---|---|---|"]
    for name, (ours, theirs, bar) in RATIOS.items():
        ratios = [each[ours] / each[theirs] for each in later]
        lines.append(f"| {name} | {show(ratios)} | {bar} | {first[ours] / first[theirs]:.3f} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Read the options, run, print the table and write everything."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: TMPDIR")
    parser.add_argument("--quick", action="store_true", help="two rounds of 10M parameters")
    parser.add_argument("--output", type=Path, default=Path("output/checkpoint.json"))
    args = parser.parse_args(argv)
    if args.quick:
        args.parameters, args.rounds = 10_000_000, 2
    rounds = run(args)
    print(f"\n{table(rounds)}\n", flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: str(value) for key, value in vars(args).items()}
    at = datetime.now(UTC).isoformat(timespec="seconds")
    report = {"at": at, "settings": settings, "rounds": rounds}
    args.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
