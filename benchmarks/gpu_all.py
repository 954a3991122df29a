"""All measurements on one GPU, in parts of at most nine minutes, with one page at the end.

    bash scripts/measure_gpu.sh all [--output DIRECTORY] [--parts kernels ppo] [--again]
    bash scripts/measure_gpu.sh all --minutes 9     # the first parts, within nine minutes
    bash scripts/measure_gpu.sh all --tiny          # toys, without a GPU

Each part is a command with a time limit. Its output goes to DIRECTORY/PART.log and its end to
DIRECTORY/PART.json: a part that succeeded is not run again without `--again`. `page.md`, written
after each part, has the output of the parts and a line for each gate. A gate that fails, or a part
that failed or had no time, is exit code 1.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Gate = tuple[str, bool]

MINUTES = 9
"""Of a part at most."""

OVERHEAD = {"stage 0": 3.0, "stage 3": 8.0}
"""Per cent of a step that the engine may add to a plain loop's."""

RIGHT = 0.7
"""Share of the embedded task's prompts that step 3 must answer right; on CPUs it is 0.8."""

REPLAYED = 0.9
"""Share of decoding passes that come from graphs."""

TAIL = 80
"""Lines of a part on the page."""

LEAST = 20.0
"""Seconds without which no part is started."""

TESTS = Path(__file__).parents[1] / "tests"


def gpu_tests() -> list[str]:
    """The tests that need a GPU, by the files that mark some: collecting all takes a minute."""
    files = (each for each in sorted(TESTS.rglob("test_*.py")) if "mark.gpu\n" in each.read_text())
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    return [*pytest, *(str(each.relative_to(TESTS.parent)) for each in files)]


def overhead_gates(out: Path) -> Iterator[Gate]:
    """Overhead of the engine over a plain loop, of the middle round."""
    rounds = json.loads((out / "results.json").read_text())["overhead"]
    for system, most in OVERHEAD.items():
        over = sorted(
            100 * (ours["seconds"] / plain["seconds"] - 1)
            for ours, plain in zip(rounds[system], rounds["plain"], strict=True)
            if ours and plain
        )
        found = over[len(over) // 2] if over else float("nan")
        yield f"{system} adds {found:.1f} % to a plain loop, at most {most:g} %", found <= most


def ppo_gates(out: Path) -> Iterator[Gate]:
    """Those of the benchmark itself."""
    from benchmarks.ppo_gpu import gates

    yield from gates(json.loads((out / "results.json").read_text()))


def generation_gates(out: Path) -> Iterator[Gate]:
    """Share of decoding passes that were replayed."""
    for row in json.loads((out / "results.json").read_text()):
        share, count = row["replayed"], len(row["lengths"])
        text = f"{100 * share:.0f} % of passes of {count} prompts in {row['precision']} replayed"
        yield f"{text}, at least {100 * REPLAYED:g} %", share >= REPLAYED


def train_gates(out: Path) -> Iterator[Gate]:
    """Result of the three steps on the embedded task."""
    steps = json.loads((out / "run" / "summary.json").read_text())["steps"]
    right = list(steps["step3_ppo"]["eval"]["judge"].values())[-1]
    yield f"{100 * right:.1f} % of answers are right, at least {100 * RIGHT:g} %", right >= RIGHT


@dataclass(frozen=True)
class Part:
    """A command, and the gates of its results."""

    name: str
    about: str
    words: str
    """Arguments of Python; {out} is the part's directory."""

    tiny: str
    """Further arguments of a toy run."""

    gates: Callable[[Path], Iterator[Gate]] = lambda _: iter(())

    def command(self, out: Path, *, tiny: bool) -> list[str]:
        """The command line."""
        if self.name == "tests":
            return gpu_tests()
        if self.name == "kernels" and tiny:  # its measurements need a GPU
            return [sys.executable, "-m", "pipeline.kernels"]
        words = f"{self.words} {self.tiny if tiny else ''}".split()
        return [sys.executable, *(each.format(out=out) for each in words)]


FEW = "--sft.max_steps 2 --reward.max_steps 2 --ppo.max_steps 1"

PARTS = (
    Part("environment", "versions, devices, limits", "-m pipeline.launch.env_report", ""),
    Part("tests", "tests that need a GPU", "", ""),
    Part("kernels", "CUDA kernels against PyTorch", "-m benchmarks.kernels_gpu --output {out}", ""),
    Part("overhead", "the engine over a plain loop, OPT-1.3B",
         "-m benchmarks.engine_gpu --parts overhead --output {out}",
         "--tiny --device cpu --rounds 1 --steps 4", overhead_gates),
    Part("overlap", "copies of parameters during the computation",
         "-m benchmarks.engine_gpu --parts overlap --output {out}", "--tiny --device cpu"),
    Part("generation", "greedy responses against generate of transformers",
         "-m benchmarks.generation --rounds 3 --output {out}", "--rounds 1 --tiny",
         generation_gates),
    Part("ppo", "an iteration of PPO, OPT-1.3B with a reward model of 350M",
         "-m benchmarks.ppo_gpu --output {out}", "--tiny", ppo_gates),
    Part("train", "the three steps on the embedded task",
         "train.py --overwrite --output-dir {out}/run", FEW, train_gates),
)  # fmt: skip


def run(part: Part, args: argparse.Namespace, *, deadline: float) -> dict[str, Any]:
    """Run a part, unless it succeeded before or there is no time; return how it ended."""
    directory, log = args.output / part.name, args.output / f"{part.name}.log"
    ended = args.output / f"{part.name}.json"
    if ended.exists() and not args.again:
        before = json.loads(ended.read_text())
        if before["code"] == 0:
            print(f"{part.name}: done before", flush=True)
            return before
    directory.mkdir(parents=True, exist_ok=True)
    command = part.command(directory, tiny=args.tiny)
    limit = min(60.0 * MINUTES, deadline - time.monotonic())
    if limit < LEAST:
        print(f"{part.name}: no time is left", flush=True)
        log.write_text("no time was left\n")
        return {"command": command, "code": None, "seconds": 0.0}
    print(f"{part.name}: {part.about}", flush=True)
    began = time.monotonic()
    code = run_command(command, log, limit)
    result = {"command": command, "code": code, "seconds": time.monotonic() - began}
    ended.write_text(json.dumps(result))
    how = "was ended" if code is None else f"exit code {code}"
    print(f"{part.name}: {how} after {result['seconds']:.0f} s, {log}", flush=True)
    return result


def run_command(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """Run it with its output in a file; its exit code, or None if its time was over.

    Then all processes that it has started are ended.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def gates_of(part: Part, result: Mapping[str, Any], args: argparse.Namespace) -> list[Gate]:
    """The gates of a part; with toys they only require that there are figures."""
    how = "had no time to end" if result["code"] is None else f"ended with code {result['code']}"
    found = [(f"{part.name} {how}", result["code"] == 0)]
    if result["code"] is None:
        return found
    try:
        gates = [*part.gates(args.output / part.name)]
    except (OSError, LookupError, ValueError, ArithmeticError) as error:
        return [*found, (f"{part.name} left no figures: {error!r}", False)]
    return [*found, *((text, holds or args.tiny) for text, holds in gates)]


def page(results: Mapping[Part, Mapping[str, Any]], args: argparse.Namespace) -> tuple[str, bool]:
    """The page, and whether every gate holds."""
    every = [gate for part, result in results.items() for gate in gates_of(part, result, args)]
    lines = ["# Measured on one GPU", "", "| holds | what |", "| --- | --- |"]
    lines += [f"| {'yes' if holds else '**no**'} | {text} |" for text, holds in every]
    for part, result in results.items():
        log = (args.output / f"{part.name}.log").read_text(errors="replace").splitlines()
        lines += ["", f"## {part.name}: {part.about}", "", f"{result['seconds']:.0f} s:", ""]
        lines += [f"    {' '.join(result['command'])}", "", "```text", *log[-TAIL:], "```"]
    return "\n".join(lines) + "\n", all(holds for _, holds in every)


def main(argv: Sequence[str]) -> int:
    """Run the parts in turn, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--output", type=Path, default=Path("output/gpu_all"))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all parts")
    parser.add_argument("--again", action="store_true", help="also parts that succeeded before")
    parser.add_argument("--tiny", action="store_true", help="toys, without a GPU")
    args = parser.parse_args(argv)
    if not args.tiny:
        import torch

        if not torch.cuda.is_available():
            parser.error("there is no GPU; --tiny runs the same parts anywhere")
    args.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    results: dict[Part, dict[str, Any]] = {}
    text, holds = "", False
    for part in PARTS:
        if part.name in args.parts:
            results[part] = run(part, args, deadline=deadline)
            text, holds = page(results, args)
            (args.output / "page.md").write_text(text)
    print(text.partition("\n## ")[0])
    print(f"{args.output / 'page.md'} has the tables")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
