"""Steps beside other programs: one thread, all threads, and the project's own way, side by side.

    python -m benchmarks.busy                         # quiet, and with four busy processes
    python -m benchmarks.busy --busy 4 --apart --steps 1 2 --rounds 3

Runs the three steps of the embedded default, bounded, once to have models; then each step in each
way, in turn, that many rounds. `one` and `all` spin as OpenMP does by itself; `ours` is what a user
gets without any option. Shown are median optimizer steps a second (iterations in step 3), the best
of one and all, and what ours loses against it. The machine must have nothing else to do.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.signals import EXIT_INTERRUPTED

STEPS = {1: "step1_sft", 2: "step2_reward", 3: "step3_ppo"}
LENGTHS = {1: 40, 2: 40, 3: 3}
"""Optimizer steps of a trial, iterations in step 3."""

TRIAL_SECONDS = 45

BOUNDS = {
    1: ("--data.max_eval_rows", "16"),
    2: ("--data.max_eval_rows", "16", "--normalization_prompts", "8"),
    3: ("--data.max_eval_rows", "16"),
}
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
DECIDED = ("OMP_NUM_THREADS", "RLHF_THREADS", *OPENMP)
SPIN = {"GOMP_SPINCOUNT": "300000"}
"""As libgomp does where no variable says anything; named, it keeps ours out."""


def ways() -> Mapping[str, Mapping[str, str]]:
    """The environment of each way."""
    cores = str(len(os.sched_getaffinity(0)))
    return {
        "one": {"RLHF_THREADS": "1"},
        "all": {"RLHF_THREADS": cores, **SPIN},
        "ours": {},
    }


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """This one without what a user may have decided about threads, and with `more`."""
    kept = {name: value for name, value in os.environ.items() if name not in DECIDED}
    return {**kept, **more}


BURN = """
import os, sys
for _ in range(int(sys.argv[1]) - 1):
    if os.fork() == 0:
        break
while True:
    pass
"""


@contextmanager
def busy(number: int, *, apart: bool) -> Iterator[None]:
    """So many other processes, each of which wants a core.

    They share a session, as the jobs of one terminal do, or each has its own (`apart`): where
    Linux's autogroups are on, cores are shared out among sessions first.
    """
    sizes = [1] * number if apart else [number] * (number > 0)
    command = [sys.executable, "-c", BURN]
    others = [subprocess.Popen([*command, str(size)], start_new_session=True) for size in sizes]
    try:
        yield
    finally:
        for other in others:
            os.killpg(other.pid, signal.SIGKILL)
            other.wait()


def make_models(out: Path) -> None:
    """The three steps in a small way: what the trials start from."""
    words = ["--sft.max_steps", "60", "--reward.max_steps", "8", "--ppo.max_steps", "1"]
    subprocess.run(
        [sys.executable, "train.py", "--output-dir", str(out), *words],
        env=environment({"RLHF_THREADS": "1"}),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def speed(number: int, models: Path, out: Path, way: Mapping[str, str], length: int) -> float:
    """Optimizer steps a second of one trial, the first two and evaluations not counted.

    A trial that is not over `TRIAL_SECONDS` after its first step ends with the step at hand.
    """
    name = STEPS[number]
    command = [sys.executable, "-m", f"{name}.train", "--config", f"{models / name}/config.yaml"]
    command += ["--output_dir", str(out), "--max_steps", str(length), *BOUNDS[number]]
    with subprocess.Popen(
        command,
        env=environment({**way, "RLHF_PLANNED": "1"}),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as trial:
        while trial.poll() is None and not steps_of(out):
            time.sleep(0.1)
        with suppress(subprocess.TimeoutExpired):
            trial.wait(TRIAL_SECONDS)
        if trial.poll() is None:
            trial.send_signal(signal.SIGINT)
    if trial.returncode not in (0, EXIT_INTERRUPTED):
        raise SystemExit(f"{' '.join(command)} ended with code {trial.returncode}")
    trained = steps_of(out)
    skipped = min(2, len(trained) - 1)
    seconds = sum(line["tokens"] / line["tokens_per_second"] for line in trained[skipped:])
    return (len(trained) - skipped) / seconds


def steps_of(out: Path) -> list[dict[str, float]]:
    """The metrics of the steps so far, evaluations left out."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [line for line in map(json.loads, lines) if "tokens_per_second" in line]


def main(argv: Sequence[str]) -> None:
    """Run the trials and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 4], help="busy processes")
    parser.add_argument("--apart", action="store_true", help="give each busy process a session")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, help="optimizer steps of every trial")
    args = parser.parse_args(argv)
    write = sys.stdout.write
    with tempfile.TemporaryDirectory() as scratch:
        models = Path(scratch) / "models"
        make_models(models)
        write("| busy | step | one | all | ours | loss of ours |\n|---|---|---|---|---|---|\n")
        for others in args.busy:
            for number in args.steps:
                found: dict[str, list[float]] = {name: [] for name in ways()}
                with busy(others, apart=args.apart):
                    for turn in range(args.rounds):
                        for name, way in ways().items():
                            out = Path(scratch) / f"{others}-{number}-{turn}-{name}"
                            length = args.length or LENGTHS[number]
                            found[name].append(speed(number, models, out, way, length))
                middle = {name: statistics.median(each) for name, each in found.items()}
                loss = max(middle["one"], middle["all"]) / middle["ours"]
                shown = " | ".join(f"{middle[name]:.2f}" for name in ways())
                write(f"| {others} | {number} | {shown} | {loss:.2f} x |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
