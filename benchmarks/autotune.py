"""Autotuning against an exhaustively measured grid.

    python -m benchmarks.autotune --directory DIR [--case states] [--rounds 2] [--minutes 3.5]

Step 1 of the embedded model. `--case states`: on two processes four sizes of micro-batches, three
ZeRO stages, recomputing or not, 24 candidates. `--case mesh-2` and `mesh-4`: on two or four
processes stages of a pipeline, layers that two compute together, ZeRO stages and sizes. Every round
measures all of them with `--autotune-strategy grid`, in a directory of its own; then
`--autotune-strategy model` tunes from nothing, with a third of the trials, and of `states` a
process of its third trial is killed with SIGKILL. It begins with slow settings. After `--minutes`
it stops; the same command goes on, so that a machine has to be quiet for no longer at a time.

Whatever else a machine does makes a trial slower and never faster, so a candidate's speed is that
of its fastest round. Noise is by how much the second round falls behind it: the median over the
candidates. A choice is the best within noise if it is slower than the best by no more than that.

Beside the real tuning, the strategies are replayed on the table, random with a hundred seeds: after
how many trials they have first tried a candidate that is the best within noise, and the best one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from pipeline.autotune.points import Point, best_of
from pipeline.autotune.space import Candidate, Space, make_space
from pipeline.autotune.strategies import Strategy, next_candidate, usual_trials
from pipeline.budget.machine import Machine
from pipeline.config import EMBEDDED, TrainedModelConfig
from pipeline.signals import EXIT_REQUEUE
from step1_sft.config import SFTConfig

TRAINED = TrainedModelConfig(path=EMBEDDED, zero_stage=3, gradient_checkpointing=True)


@dataclass(frozen=True)
class Case:
    """What is tuned."""

    processes: int
    given: Mapping[str, str]
    model: TrainedModelConfig
    """As the tuning begins."""

    steps: int
    """Of a trial, that are measured."""

    killed: int | None = None
    """Of the real tuning, the trial that is killed."""

    @property
    def words(self) -> list[str]:
        """Of the command line."""
        begins = {"zero_stage": self.model.zero_stage}
        if self.model.gradient_checkpointing:
            begins["gradient_checkpointing"] = True
        model = [f"--sft.model.{name}={str(value).lower()}" for name, value in begins.items()]
        words = ["--deployment-type", "single_node", "--num-processes", str(self.processes)]
        words += ["--sft.batch_size", "32", "--sft.micro_batch_size", "1", *model]
        words += ["--autotune-steps", str(self.steps)]
        return [
            *words,
            "--autotune-space",
            *(f"{name}={each}" for name, each in self.given.items()),
        ]

    @cached_property
    def space(self) -> Space:
        """The candidates."""
        start = SFTConfig(batch_size=32, micro_batch_size=1, model=self.model)
        machine = Machine(self.processes, self.processes, None, None)
        return make_space(start, machine, given=self.given)

    @property
    def third(self) -> int:
        """Of the candidates: the trials that a tuning makes."""
        return usual_trials("model", len(self.space.candidates))


MIXTURES = {
    "parallel.pp": "1,2",
    "parallel.tp": "1,2",
    "parallel.replicas": "1",
    "zero_stage": "0,2",
    "gradient_checkpointing": "false",
    "micro_batch_size": "1,4,16",
}
CASES = {
    "states": Case(
        2,
        {
            "parallel.pp": "1",
            "parallel.tp": "1",
            "micro_batch_size": "1,2,4,8",
            "zero_stage": "0,2,3",
            "gradient_checkpointing": "false,true",
        },
        TRAINED,
        steps=20,
        killed=3,
    ),
    "mesh-2": Case(2, MIXTURES, TrainedModelConfig(path=EMBEDDED, zero_stage=2), steps=10),
    "mesh-4": Case(4, MIXTURES, TrainedModelConfig(path=EMBEDDED, zero_stage=2), steps=10),
}

Speeds = Mapping[Candidate, float]


def tune(
    case: Case, out: Path, strategy: Strategy, trials: int, *, until: float, kill: int | None
) -> bool:
    """Tune, or go on with it; whether it has ended. A process of trial `kill` is killed."""
    words = ["--output-dir", str(out), "--step", "1", "--autotune", "tune", *case.words]
    words += ["--autotune-strategy", strategy, "--autotune-trials", str(trials)]
    process = subprocess.Popen([sys.executable, "train.py", *words])
    while process.poll() is None:
        time.sleep(0.2)
        if kill is not None and len(read(out)) == kill - 1:
            kill = None if kill_a_worker(process.pid) else kill
        if time.monotonic() > until:
            process.terminate()
            break
    code = process.wait()
    if code not in (0, EXIT_REQUEUE):
        raise SystemExit(f"train.py ended with exit code {code}")
    return code == 0


def kill_a_worker(pid: int) -> bool:
    """Kill one of the processes that train below `pid`; whether there was one."""
    for process in psutil.Process(pid).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "step1_sft.train" in words and "pipeline.launch.torchrun" not in words:
            time.sleep(2)  # in the middle of what it does
            process.kill()
            return True
    return False


def read(out: Path) -> list[Point]:
    """The trials of a tuning so far."""
    file = out / "autotune" / "trials.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [
        Point(**{**each, "tokens_per_second": tuple(each["tokens_per_second"])}) for each in records
    ]


def speeds_of(space: Space, points: Sequence[Point]) -> Speeds:
    """By candidate."""
    return {space.candidate(point.settings): point.speed or 0.0 for point in points}


def replay(space: Space, table: Speeds, strategy: Strategy, seed: int) -> list[Candidate]:
    """The candidates that a strategy tries, in its order, if a table answers."""
    points: list[Point] = []
    every = len(space.candidates)
    while candidate := next_candidate(space, points, strategy=strategy, trials=every, seed=seed):
        points.append(
            Point(
                step="step1_sft",
                key="",
                settings=space.named(candidate),
                outcome="measured",
                tokens_per_second=(table[candidate],),
            )
        )
    return [space.candidate(point.settings) for point in points]


def report(case: Case, rounds: Sequence[Speeds], tuned: Sequence[Point]) -> None:
    """Print the table and what the strategies found in it."""
    space = case.space
    runs = {each: sorted(table[each] for table in rounds) for each in space.candidates}
    table = {each: speeds[-1] for each, speeds in runs.items()}
    order = sorted(table, key=lambda each: -table[each])
    gaps = [1 - second / first for *rest, first in runs.values() for second in rest[-1:]]
    noise = statistics.median(gaps) if gaps else 0.0
    good = {each for each in order if table[each] >= table[order[0]] * (1 - noise)}
    print(f"\n{'candidate':<62} {'tokens/s':>9}   {'of the best':>11}")
    for each in order:
        words = "  ".join(f"{name} {value}" for name, value in space.named(each).items())
        mark = "*" if each in good else " "
        print(f"{words:<62} {table[each]:>9,.0f} {mark} {table[each] / table[order[0]]:>11.3f}")
    if gaps:
        print(f"noise: median {100 * noise:.1f} %, largest {100 * max(gaps):.1f} %; * within it")
    best = best_of(tuned)
    assert best is not None
    share = table[space.candidate(best.settings)] / table[order[0]]
    print(
        f"tuned by model with {len(tuned)} trials of {len(space.candidates)}"
        f" ({', '.join(point.outcome for point in tuned)}): {dict(best.settings)},"
        f" {share:.3f} of the best by the grid, {sum(point.seconds for point in tuned):.0f} s"
    )
    for strategy, seeds in (("model", 1), ("random", 100)):
        near: list[int] = []
        exact: list[int] = []
        for seed in range(seeds):
            tried = replay(space, table, strategy, seed)
            near.append(1 + next(n for n, each in enumerate(tried) if each in good))
            exact.append(1 + tried.index(order[0]))
        print(
            f"replayed, {strategy}: the best within noise after {statistics.median(near):g} trials,"
            f" the best after {statistics.median(exact):g}; within {case.third} trials"
            f" {sum(each <= case.third for each in near)} and"
            f" {sum(each <= case.third for each in exact)} of {seeds}"
        )


def main() -> None:
    """Measure what is left to be measured, and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--case", choices=CASES, default="states")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e6)
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    case = CASES[args.case]
    every = len(case.space.candidates)
    outs = [args.directory / f"round-{number}" for number in range(1, args.rounds + 1)]
    tunings: list[tuple[Path, Strategy, int, int | None]] = [
        *((out, "grid", every, None) for out in outs),
        (args.directory / "tuned", "model", case.third, case.killed),
    ]
    for out, strategy, trials, kill in tunings:
        if not tune(case, out, strategy, trials, until=until, kill=kill):
            print("time is up; the same command goes on")
            return
    rounds = [speeds_of(case.space, read(out)) for out in outs]
    report(case, rounds, read(args.directory / "tuned"))


if __name__ == "__main__":
    main()
