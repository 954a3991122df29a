"""The plan's bytes against those of real steps of a model that processes share in a mixture.

    python -m benchmarks.plan_mixtures [--mixtures NAME ...] [--output FILE]

Step 1 of a Llama of 61M parameters in fp32, in rows of the full length, on two and four processes:
stages of a pipeline, layers that processes compute together, replicas, ZeRO stages. Two optimizer
steps are taken; of the second the highest sum of all tensors of each process is compared with what
the plan counts to train, for the stage of the pipeline that the process has.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan_mixtures_worker import MIXTURES

MIB = 2**20


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each mixture."""
    lines = [
        "| mixture | processes | planned, MiB by rank | measured, MiB by rank | ratio |",
        "|---|---|---|---|---|",
    ]
    for case in found:
        planned, measured = case["planned"], case["measured"]
        ratios = [one / other for one, other in zip(planned, measured, strict=True)]
        low, high = (f"{each:.3f}" for each in (min(ratios), max(ratios)))
        columns = (", ".join(f"{each / MIB:,.0f}" for each in way) for way in (planned, measured))
        share = low if low == high else f"{low} to {high}"
        lines.append(f"| {case['name']} | {len(planned)} | {' | '.join(columns)} | {share} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Run, print the table, write everything."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixtures", nargs="+", choices=list(MIXTURES), default=list(MIXTURES))
    parser.add_argument("--output", type=Path, default=Path("output/plan_mixtures.json"))
    args = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    for name in args.mixtures:
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch) / "result.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(MIXTURES[name].processes)]
            command += ["-m", "benchmarks.plan_mixtures_worker", name, scratch, str(result)]
            subprocess.run(command, check=True)
            found.append({"name": name, **json.loads(result.read_text())})
        print(table(found[-1:]).splitlines()[-1], flush=True)
    print(table(found))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
