"""An exact-match benchmark on sums: how much does each method of step 3 improve the model?

    python -m benchmarks.arithmetic --out DIR [--seeds 1 2 3] [--methods grpo rloo raft] \
        [--digits 2] [--rows 8100] [--options "--ppo.max_steps 300 --sft.max_steps 3000"]

Each seed determines the sums, their demonstrations (half of them right), the base model's random
weights and all draws of training. `train.py --config arithmetic-grpo.yaml` then runs step 1
once and step 3 by each method, with `--options` after the preset's settings. Results already in DIR
are kept, so an interrupted command resumes where it stopped.

The table has exact match on 512 sums that no step trained on, sampled (temperature 1) and greedy,
of step 1's model and of the exported actor. Gains are given as a share of grpo_2024's, by the
sampled rate.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    *("method", "seed", "sampled: step 1", "exported actor", "greedy: step 1", "exported actor"),
    *("share of grpo_2024's gain", "KL per response", "of iteration", "responses"),
    *("seconds of step 1", "of step 3"),
)


def main(argv: Sequence[str]) -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the runs, which are kept"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", default=["grpo"])
    parser.add_argument("--digits", type=int, default=2, help="digits of each number")
    parser.add_argument("--rows", type=int, default=8100, help="maximum distinct sums")
    parser.add_argument("--options", default="", help="further options of train.py, as one string")
    args = parser.parse_args(argv)
    print(f"{platform.processor()}, Python {platform.python_version()}\n")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for seed in args.seeds:
        directory = args.out / f"seed{seed}"
        write_sums(directory, seed, digits=args.digits, rows=args.rows)
        train(directory, seed, args.methods, shlex.split(args.options))
        for line in lines(directory / "run", seed, args.methods):
            print(line, flush=True)


def write_sums(directory: Path, seed: int, *, digits: int, rows: int) -> None:
    """Write the rows and the base model of a seed unless they exist."""
    if (directory / "sums").is_dir():
        return
    words = ["--digits", str(digits), "--rows", str(rows), "--seed", str(seed)]
    words += ["--out", str(directory / "sums"), "--model", str(directory / "base")]
    run("-m", "pipeline.demo.arithmetic", *words, log=directory.with_name(f"{directory.name}.log"))


def train(directory: Path, seed: int, methods: Sequence[str], options: Sequence[str]) -> None:
    """Run step 1, then step 3 with each method; skip finished runs."""
    words = ["--config", "arithmetic-grpo.yaml", "--method", *methods, "--seed", str(seed)]
    words += ["--actor-model", str(directory / "base"), "--data-path", str(directory / "sums")]
    words += ["--output-dir", str(directory / "run"), "--resume", *options]
    run("train.py", *words, log=directory.with_name(f"{directory.name}.log"))


def run(*words: str, log: Path) -> None:
    """Run a command of the project and append its output to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command, env = [sys.executable, *words], {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("a") as file:
        ended = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=file, check=False)
    if ended.returncode:
        sys.exit(f"{shlex.join(words)} ended with exit code {ended.returncode}; see {log}")


def lines(directory: Path, seed: int, methods: Sequence[str]) -> list[str]:
    """One table line per method."""
    first = result(directory / "step1_sft")
    by_method = {method: result(step_of(directory, method)) for method in methods}
    grpo = gain(by_method["grpo_2024"]) if "grpo_2024" in by_method else None
    found = []
    for method, outcome in by_method.items():
        figures = outcome["eval"]
        share = gain(outcome) / grpo if grpo else None
        cells = [
            *(method, str(seed), percent(figures["sampled_reward_before"])),
            *(percent(figures["sampled_reward_after"]), percent(figures["reward_before"])),
            *(percent(figures["reward_after"]), "-" if share is None else f"{share:.2f}"),
            *(f"{figures['kl']:.2f}", str(figures["best_step"]), f"{outcome['samples']:,}"),
            *(f"{first['seconds']:.0f}", f"{outcome['seconds']:.0f}"),
        ]
        found.append("| " + " | ".join(cells) + " |")
    return found


def step_of(directory: Path, method: str) -> Path:
    """Return the directory of a method's step 3: `step3_ppo` for a single method."""
    own = directory / f"step3_{method}"
    return own if own.is_dir() else directory / "step3_ppo"


def result(step: Path) -> Mapping[str, Any]:
    """Figures of a finished step, and its time."""
    return json.loads((step / "result.json").read_text())


def percent(share: float | None) -> str:
    """Format 0.85 as `85.0 %`, and None as `-`."""
    return "-" if share is None else f"{100 * share:.1f} %"


def gain(outcome: Mapping[str, Any]) -> float:
    """Increase of the sampled exact-match rate over step 1."""
    figures = outcome["eval"]
    return figures["sampled_reward_after"] - figures["sampled_reward_before"]


if __name__ == "__main__":
    main(sys.argv[1:])
