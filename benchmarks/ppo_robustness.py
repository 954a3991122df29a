"""PPO under settings that used to ruin it: does the judge's rate stay at step 1's or above?

    python -m benchmarks.ppo_robustness --out DIR [--seeds 1 2 3] [--cases rate-x3 no-kl]

Steps 1 and 2 of the embedded default run once for each seed, and once more for a reward model that
is trained on a tenth of its steps; step 3 then runs in every case on their outputs. What DIR
already holds is kept, so that a command that was cut off goes on where it stopped. A case passes
where its judge's rate, the share of sampled answers to held-out prompts that are correct and
polite, is at least that of step 1's model, or where the run stopped with a sentence and exported
such an actor.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PRESET = yaml.safe_load((ROOT / "configs" / "embedded.yaml").read_text())
RATES = {role: float(PRESET["ppo"][role]["optim"]["lr"]) for role in ("actor", "critic")}
TRIPLED = [word for role, lr in RATES.items() for word in (f"--ppo.{role}.optim.lr", f"{3 * lr:g}")]
WEAK_STEPS = PRESET["reward"]["max_steps"] // 10
"""Of step 2 for a reward model that is half trained."""

WARNINGS = ("iteration ", "PPO made", "the reward model orders", "diverged", "error:")
"""How sentences begin, or what they hold, that say what went wrong."""


@dataclass(frozen=True)
class Case:
    """Settings of step 3 that differ from the embedded default's."""

    name: str
    options: tuple[str, ...] = ()
    weak_reward: bool = False


LORA_BF16 = tuple(
    word
    for role in ("actor", "critic")
    for word in (f"--ppo.{role}.precision", "bf16", f"--ppo.{role}.lora.rank", "16")
)
CASES = (
    Case("default"),
    Case("rate-x3", tuple(TRIPLED)),
    Case("no-kl", ("--ppo.kl_coef", "0")),
    Case("4-epochs", ("--ppo.ppo_epochs", "4")),
    Case("rate-x3-4-epochs", (*TRIPLED, "--ppo.ppo_epochs", "4")),
    Case("weak-reward", weak_reward=True),
    Case("bf16-lora", LORA_BF16),
)


def main(argv: Sequence[str]) -> None:
    """Run what is missing and print the table."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where the runs go, and stay")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    args = parser.parse_args(argv)
    print(f"{processor()}, Python {platform.python_version()}\n")
    names_of_columns = ("case", "seed", "reward model", "judge: step 1", "exported actor")
    names_of_columns += ("of iteration", "KL per answer", "warnings")
    print("| " + " | ".join(names_of_columns) + " |\n" + "|---" * len(names_of_columns) + "|")
    for case in (case for case in CASES if case.name in args.cases):
        for seed in args.seeds:
            print(row(case, seed, run_case(case, seed, args.out)), flush=True)


def run_case(case: Case, seed: int, out: Path) -> Path:
    """The directory of the case's run, made where it is not there."""
    whole, weak = out / f"seed{seed}", out / f"seed{seed}-weak"
    train(whole, seed, "--step", "1", "2")
    if case.weak_reward:
        copy_steps(whole, weak, ["step1_sft"])
        train(weak, seed, "--step", "2", "--reward.max_steps", str(WEAK_STEPS))
    directory = out / f"seed{seed}-{case.name}"
    copy_steps(weak if case.weak_reward else whole, directory, ["step1_sft", "step2_reward"])
    train(directory, seed, "--step", "3", *case.options)
    return directory


def train(directory: Path, seed: int, *words: str) -> None:
    """Run train.py, its log beside the directory; steps that are done are skipped.

    A diverged run is a result as well, and stays as it is.
    """
    last = "step3_ppo" if words[1] == "3" else "step2_reward"
    if any((directory / last / name).is_file() for name in ("result.json", "diverged.json")):
        return
    command = [sys.executable, "train.py", "--seed", str(seed), "--output-dir", str(directory)]
    command += [*words, "--resume"]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with log_of(directory).open("a") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)


def log_of(directory: Path) -> Path:
    """What the runs in a directory logged."""
    return directory.with_name(f"{directory.name}.log")


def copy_steps(source: Path, target: Path, steps: Sequence[str]) -> None:
    """Have the outputs of finished steps in another directory, without their checkpoints."""
    for step in steps:
        if not (target / step).exists():
            ignore = shutil.ignore_patterns("checkpoints", ".lock")
            shutil.copytree(source / step, target / step, ignore=ignore)


def row(case: Case, seed: int, directory: Path) -> str:
    """A line of the table."""
    accuracy = evaluated(directory / "step2_reward").get("accuracy_after", float("nan"))
    figures = evaluated(directory / "step3_ppo")
    verify = figures.get("judge", {})
    sentences = list(dict.fromkeys(warnings_of(directory)))
    cells = [
        case.name,
        str(seed),
        f"{100 * accuracy:.1f} %",
        percent(verify.get("step1_sft")),
        percent(verify.get("step3_ppo")),
        str(figures.get("best_step", "-")),
        f"{figures['kl']:.2f}" if "kl" in figures else "-",
        "; ".join(sentences) or "-",
    ]
    return "| " + " | ".join(cells) + " |"


def evaluated(step: Path) -> Mapping[str, Any]:
    """The step's figures; empty where it has not finished."""
    result = step / "result.json"
    return json.loads(result.read_text())["eval"] if result.is_file() else {}


def warnings_of(directory: Path) -> Iterator[str]:
    """The kinds of warnings that the run logged."""
    log = log_of(directory)
    for line in log.read_text().splitlines() if log.is_file() else ():
        text = line[9:] if line[2:3] == ":" else line
        if text.startswith("iteration ") and " -> " in text:
            continue  # a printed sample
        if any(text.startswith(begin) for begin in WARNINGS) or "diverged" in text:
            yield text.split(";")[0]


def percent(share: float | None) -> str:
    """0.85 as `85.0 %`."""
    return "-" if share is None else f"{100 * share:.1f} %"


def processor() -> str:
    """The processor's name, and whether it has instructions for bf16."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    bf16 = "with" if "avx512_bf16" in text else "without"
    return f"{names[0] if names else platform.processor()}, {bf16} instructions for bf16"


if __name__ == "__main__":
    main(sys.argv[1:])
