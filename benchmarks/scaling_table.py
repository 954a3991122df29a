"""How fast step 1 trains at each setting, in the columns of Modalities' scaling tables.

    python -m benchmarks.scaling_table --data-path train.jsonl.gz
    python -m benchmarks.scaling_table --data-path train.jsonl.gz --model DIR \
        --processes 8 --stages 2 3 --checkpointing off on --micro-batches 4 8 --precision bf16

Runs step 1 as users do, each setting in processes of its own, `--rounds` times in turn, and prints
a row for each: parameters, processes (GPUs, where there are any), accumulation, sequences of a
micro-batch (MBS) and of an optimizer step (GBS), length, precision, how states are sharded,
activation checkpointing (AC), the device, and samples a second, MFU and HFU as medians of the steps
after the second. MFU is that of `metrics.jsonl` (docs/report.md). `-` stands for what has no room.
Without `--model` it is a Llama of 15M parameters with random weights.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.training import build_model
from pipeline.config import FrozenModelConfig
from pipeline.models.meta import model_on_meta

WARM_UP = 2
"""Steps that do not count."""

SHARDED = {0: "nothing", 1: "optimizer", 2: "optimizer, gradients", 3: "all"}
COLUMNS = (
    *("parameters", "processes", "accumulation", "MBS", "GBS", "length", "precision"),
    *("sharded", "AC", "device", "samples/s", "MFU", "HFU"),
)


@dataclass(frozen=True)
class Setting:
    """One row."""

    processes: int
    stage: int
    checkpointing: bool
    micro_batch: int


@dataclass(frozen=True)
class Speed:
    """Of one run."""

    samples: float
    """A second, of all processes."""

    mfu: float
    hfu: float


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """All mixtures that differ: what one process shards is the same at every stage."""
    mixtures = itertools.product(
        args.processes, args.stages, [each == "on" for each in args.checkpointing]
    )
    return [
        Setting(processes, stage, checkpointing, micro_batch)
        for processes, stage, checkpointing in mixtures
        for micro_batch in args.micro_batches
        if processes > 1 or stage == args.stages[0]
    ]


def run(setting: Setting, args: argparse.Namespace) -> Speed | None:
    """Train with it; None where there is no room."""
    with tempfile.TemporaryDirectory() as scratch:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(setting.processes)]
        command = [sys.executable, *launcher, "-m", "step1_sft.train"]
        command += ["--output_dir", scratch, "--data.path", args.data_path]
        command += ["--data.split", "1", "0", "0", "--data.max_eval_rows", "8"]
        command += ["--data.max_length", str(args.length), "--max_steps", str(args.steps)]
        command += ["--eval_every", "0", "--keep_best", "false", "--save_every", "null"]
        command += ["--batch_size", str(args.batch_size)]
        command += ["--micro_batch_size", str(setting.micro_batch)]
        command += ["--model.path", args.model, "--model.precision", args.precision]
        command += ["--model.zero_stage", str(setting.stage)]
        command += ["--model.gradient_checkpointing", str(setting.checkpointing).lower()]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode and "out of memory: " in ended.stderr:
            return None
        if ended.returncode:
            raise SystemExit(f"{' '.join(command)}\n{ended.stderr}")
        return speed_of(Path(scratch, "metrics.jsonl"), batch_size=args.batch_size)


def speed_of(metrics: Path, *, batch_size: int) -> Speed:
    """Medians over the steps after the first ones."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "mfu" in line][WARM_UP:]
    samples = [batch_size * line["tokens_per_second"] / line["tokens"] for line in steps]
    return Speed(
        statistics.median(samples),
        statistics.median(line["mfu"] for line in steps),
        statistics.median(line["hfu"] for line in steps),
    )


def row(setting: Setting, speeds: Sequence[Speed | None], args: argparse.Namespace) -> list[str]:
    """The cells of a setting; of several rounds the median."""
    model = model_on_meta(
        FrozenModelConfig(path=args.model), task="causal", device=torch.device("cpu")
    )
    parameters = sum(param.numel() for param in model.parameters())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    present = [speed for speed in speeds if speed is not None]
    figures = ["-"] * 3
    if len(present) == len(speeds):
        figures = [
            f"{statistics.median(speed.samples for speed in present):.2f}",
            f"{statistics.median(speed.mfu for speed in present):.3f}",
            f"{statistics.median(speed.hfu for speed in present):.3f}",
        ]
    accumulation = -(-args.batch_size // (setting.micro_batch * setting.processes))
    return [
        f"{parameters / 1e6:.1f}M",
        *map(str, (setting.processes, accumulation, setting.micro_batch, args.batch_size)),
        *(str(args.length), args.precision, SHARDED[setting.stage]),
        *("yes" if setting.checkpointing else "no", gpu, *figures),
    ]


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """In Markdown."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + " --- |" * len(COLUMNS)
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-path", required=True, help="dialogues")
    parser.add_argument("--model", help="Hugging Face directory or id; default: Llama of 15M")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 3], choices=[0, 1, 2, 3])
    parser.add_argument("--checkpointing", nargs="+", default=["off", "on"], choices=["off", "on"])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        if args.model is None:
            args.model = directory
            build_model(Path(directory), args.data_path)
        each = settings_of(args)
        rounds = [[run(setting, args) for setting in each] for _ in range(args.rounds)]
        rows = [
            row(setting, speeds, args)
            for setting, speeds in zip(each, zip(*rounds, strict=True), strict=True)
        ]
    sys.stdout.write("\n".join(table(rows)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
