"""Steps 1 to 3 with the kernels and without: seconds of a step, and the weights they end in.

    python -m benchmarks.kernel_steps [--cases sft-bf16 ppo-fp32 ...] [--rounds 3] [--threads 2]
    python -m benchmarks.kernel_steps --quick

Each side is the step as users run it, with `kernels: required` or `kernels: off`, generation
included, in a process of its own; the two alternate, the first of a round being the last of the
next, and a ratio is taken within each round. A figure is the median over rounds of a run's median
step. The model is a Llama of 15M parameters with 32,000 words: 8 rows of 100 tokens and 100 more
that are learned; `sft-long` learns 400, more logits than `kernels` leaves whole; in step 3 8
prompts of 128 tokens are answered with 64. Weights are compared by the SHA-256 of what the step
exports: in fp32 they must be the same, in bf16 attention is rounded otherwise.
"""

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import show
from benchmarks.ppo import ANSWER, BATCH, PROMPT, build_assets
from pipeline.kernels.choice import SWITCH

WARM_UP = 2
"""Steps before the clock starts."""

SIDES = ("required", "off")


@dataclass(frozen=True)
class Case:
    """A step, its number format and the answers that it learns from."""

    step: str
    precision: str
    answer: int = 100
    same: bool = True
    """Whether the weights must be the same bit for bit."""


CASES = {
    **{
        f"{step}-{precision}": Case(step, precision, same=precision == "fp32")
        for step in ("sft", "reward", "ppo")
        for precision in ("fp32", "bf16")
    },
    "sft-long": Case("sft", "bf16", answer=400, same=False),
}


def write_rows(directory: Path, answer: int) -> Path:
    """Pairs of random words, enough for every step that is timed."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def words(count: int) -> str:
        drawn = torch.randint(4, 32_000, (count,), generator=generator)
        return " ".join(f"w{number}" for number in drawn.tolist())

    path = directory / f"rows{answer}.jsonl"
    rows = [
        {"prompt": words(100), "chosen": words(answer), "rejected": words(answer)}
        for _ in range(30 * BATCH)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def train(args: argparse.Namespace, case: Case) -> Path:
    """Run the step; its directory."""
    from pipeline.config import DataConfig, FrozenModelConfig, OptimConfig, TrainedModelConfig

    models = Path(args.directory)

    def model(name: str) -> Any:  # noqa: ANN401
        return TrainedModelConfig(
            path=str(models / name),
            precision=case.precision,  # pyright: ignore[reportArgumentType]
            optim=OptimConfig(lr=1e-5),
            kernels=args.side,
        )

    prompts = models / ("prompts.jsonl" if case.step == "ppo" else f"rows{case.answer}.jsonl")
    split = {"sft": (1, 0, 0), "reward": (0, 1, 0), "ppo": (0, 0, 1)}[case.step]
    settings: dict[str, Any] = {
        "output_dir": Path(args.output) / "run",
        "data": DataConfig(path=(str(prompts),), max_length=512, split=split, max_eval_rows=2),
        "max_steps": args.steps,
        "eval_every": 0,
        "keep_best": False,
        "batch_size": BATCH,
        "micro_batch_size": BATCH,
    }
    if case.step == "sft":
        from step1_sft.config import SFTConfig
        from step1_sft.train import train as train_sft

        return train_sft(SFTConfig(**settings, model=model("actor")))
    if case.step == "reward":
        from step2_reward.config import RewardConfig
        from step2_reward.train import train as train_reward

        return train_reward(RewardConfig(**settings, model=model("actor"), normalization_prompts=2))
    from step3_ppo.config import PPOConfig
    from step3_ppo.train import train as train_ppo

    return train_ppo(
        PPOConfig(
            **settings,
            epochs=args.steps,
            rollout_size=BATCH,
            generation_batch_size=BATCH,
            max_prompt_length=PROMPT,
            max_new_tokens=8 if args.quick else ANSWER,
            samples_every=10**6,
            actor=model("actor"),
            critic=model("reward"),
            reward=FrozenModelConfig(
                path=str(models / "reward"),
                precision=case.precision,  # pyright: ignore[reportArgumentType]
            ),
        )
    )


def measure(args: argparse.Namespace) -> None:
    """Run one side and print its figures as a line of JSON."""
    directory = train(args, CASES[args.case])
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    ends = [line["seconds"] for line in lines if "tokens_per_second" in line]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    content = hashlib.sha256()
    for path in sorted(directory.rglob("model*.safetensors")):
        if "checkpoints" not in path.parts:
            content.update(path.read_bytes())
    figures = {"seconds": statistics.median(seconds[WARM_UP:]), "weights": content.hexdigest()}
    print(json.dumps(figures))


def run_side(args: argparse.Namespace, name: str, side: str, models: Path) -> dict[str, Any]:
    """One side in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "benchmarks.kernel_steps", "--case", name, "--side", side]
        command += ["--directory", str(models), "--output", scratch, "--steps", str(args.steps)]
        command += ["--quick"] * args.quick
        environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), SWITCH: side}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(args: argparse.Namespace) -> None:
    """Alternate the sides and print the table."""
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| step | with kernels | without | with is times as fast | weights |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        models = Path(scratch)
        build_assets(models)
        for answer in {CASES[name].answer for name in args.cases}:
            write_rows(models, answer)
        for name in args.cases:
            rounds = [
                {side: run_side(args, name, side, models) for side in order}
                for order in (SIDES[:: (-1) ** number] for number in range(args.rounds))
            ]
            ratios = [each["off"]["seconds"] / each["required"]["seconds"] for each in rounds]
            ours, theirs = (
                statistics.median(each[side]["seconds"] for each in rounds) for side in SIDES
            )
            hashes = {each[side]["weights"] for each in rounds for side in SIDES}
            same = "the same" if len(hashes) == 1 else "differ in rounding"
            if CASES[name].same and len(hashes) > 1:
                same = "DIFFER"
            print(
                f"| {name} | {ours:.3f} s | {theirs:.3f} s | {show(ratios)} | {same} |", flush=True
            )
    print(f"\nload after: {os.getloadavg()[0]:.1f}")


def main(argv: Sequence[str]) -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round, four short steps")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.steps = 1, 4
    measure(args) if args.side else compare(args)


if __name__ == "__main__":
    main(sys.argv[1:])
