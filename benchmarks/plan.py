"""The plan's bytes against those of real training steps, by kind, on two gloo processes.

    python -m benchmarks.plan [--models opt gpt2 llama qwen3] [--stages 0 1 2 3] [--output FILE]

Models of a few million parameters of four families train for a step of two micro-batches at every
ZeRO stage, with nothing offloaded, the optimizer and gradients in main memory, and all on a disk as
far as the stage allows. On a CPU main memory is the device's own, so that the second grid shows
that it changes nothing. The engine's vectors are weighed one by one; what a pass takes - what
autograd keeps, logits, weights gathered at stage 3 - is the highest sum of what the profiler saw
allocated during the second micro-batch; the whole step is what all tensors of the process took at
the highest moment (`benchmarks/memory.py`), with the buffers of gradients in shared memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.plan_worker import KINDS, OFFLOADS, SHAPES

MIB = 2**20


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: for each model and stage the prediction over the measurement, the farthest off."""
    lines = [
        "| model | stage | " + " | ".join((*KINDS, "MiB")) + " |",
        "|---" * (len(KINDS) + 3) + "|",
    ]
    by_case = groupby(rows, key=lambda row: (row["family"], row["stage"]))
    for (family, stage), group in by_case:
        cases = list(group)
        cells = [_ratios(cases, kind) for kind in KINDS]
        most = max(case["measured"]["step"] for case in cases) / MIB
        lines.append(f"| {family} | {stage} | {' | '.join(cells)} | {most:.1f} |")
    return "\n".join(lines)


def _ratios(cases: Sequence[dict[str, Any]], kind: str) -> str:
    pairs = [(case["predicted"][kind], case["measured"][kind]) for case in cases]
    ratios = [predicted / measured for predicted, measured in pairs if measured]
    if any(predicted and not measured for predicted, measured in pairs):
        return "not there"
    if not ratios:
        return ""
    low, high = min(ratios), max(ratios)
    return f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} to {high:.3f}"


def main(argv: Sequence[str]) -> None:
    """Run, print the table, write everything."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=list(range(4)))
    parser.add_argument("--offloads", nargs="+", choices=OFFLOADS, default=list(OFFLOADS))
    parser.add_argument(
        "--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"]
    )
    parser.add_argument("--output", type=Path, default=Path("output/plan.json"))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", "benchmarks.plan_worker"]
        command += ["--models", *args.models, "--stages", *map(str, args.stages)]
        command += ["--offloads", *args.offloads, "--precisions", *args.precisions]
        subprocess.run([*command, "--result", str(result)], check=True)
        rows = json.loads(result.read_text())
    print(table(rows))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
