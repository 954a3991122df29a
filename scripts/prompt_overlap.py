#!/usr/bin/env python3
"""Count prompts that a run both trains on and holds out, from its steps' records.

    python scripts/prompt_overlap.py OUT

It reads OUT/step*/trained_prompts.hashes and held_out_prompts.hashes (docs/data.md), using only the
standard library and no code of the steps that wrote them. It exits with code 1 if there is an
overlap, and with 2 if there is no record.
"""

import struct
import sys
from pathlib import Path

MAGIC = b"PROMPTS1"


def read_hashes(path: Path) -> set[int]:
    """The hashes in a record: 8 bytes each, after the first 8."""
    content = path.read_bytes()
    if content[:8] != MAGIC or len(content) % 8:
        raise SystemExit(f"error: {path} is not a record of prompts")
    return {number for (number,) in struct.iter_unpack("<Q", content[8:])}


def main(out: Path) -> int:
    """Print a line for each pair of steps; return the exit code."""
    steps = sorted(path.parent for path in out.glob("step*/trained_prompts.hashes"))
    if not steps:
        sys.stderr.write(f"error: no step in {out} has left a record of its prompts\n")
        return 2
    trained = {step.name: read_hashes(step / "trained_prompts.hashes") for step in steps}
    held_out = {step.name: read_hashes(step / "held_out_prompts.hashes") for step in steps}
    overlaps = 0
    for evaluating, evaluated in held_out.items():
        for training, learned in trained.items():
            both = len(evaluated & learned)
            overlaps += both
            print(
                f"held out up to {evaluating}: {len(evaluated):6}   trained on up to {training}:"
                f" {len(learned):6}   both: {both}"
            )
    return 1 if overlaps else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
