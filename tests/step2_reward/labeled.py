"""Rows with every kind of label, in which polite responses are better, and a tiny model."""

import csv
import json
from pathlib import Path
from typing import Any

from pipeline.config import DataConfig, OptimConfig, TrainedModelConfig
from pipeline.parallel.mesh import current_mesh
from step2_reward.config import RewardConfig
from step2_reward.train import train
from tests.test_resume import read_metric

POLITE, CURT, RUDE = "Sure! It is {}.", "It is {}.", "Go away. It is {}."


def make_rows(kind: str, *, count: int = 48) -> list[dict[str, Any]]:
    """Return rows with labels of the given kind."""
    return [_row(kind, number) for number in range(count)]


def _row(kind: str, number: int) -> dict[str, Any]:
    summand, grade = divmod(number, 3)  # each prompt has every grade
    prompt = f"Add {summand} and 1."
    polite, curt, rude = (text.format(summand + 1) for text in (POLITE, CURT, RUDE))
    response = (rude, curt, polite)[grade]
    if kind == "pairs":
        return {"prompt": prompt, "chosen": polite, "rejected": rude}
    if kind == "steps":
        steps = [polite, rude, curt] if grade else [curt, polite]
        labels = [step != rude for step in steps]
        return {"prompt": prompt, "completions": steps, "labels": labels}
    labels = {"classes": ("rude", "curt", "polite")[grade], "scalar": 10.5 + 20 * grade}
    return {"prompt": prompt, "response": response, "label": labels[kind]}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def make_config(directory: Path, data: Path, base: Path, **changes: Any) -> RewardConfig:
    """Return settings of a short run of step 2 on all rows of `data`."""
    optim = OptimConfig(lr=0.003, schedule="constant", warmup_ratio=0.0)
    settings: dict[str, Any] = {
        "output_dir": directory / "out",
        "model": TrainedModelConfig(path=str(base), optim=optim),
        "data": DataConfig(path=(str(data),), max_length=64, split=(0, 1, 0), eval_fraction=0.25),
        "max_steps": 12,
        "batch_size": 16,
        "micro_batch_size": 16,
    }
    return RewardConfig(**{**settings, **changes})


def train_and_read(config: RewardConfig) -> list[float]:
    """Train on one or more processes; return the metrics that do not depend on their number."""
    train(config)
    current_mesh().world.barrier()  # the first process writes the file that all read
    names = ("loss", "accuracy", "eval_loss", "eval_mean_chosen", "eval_accuracy")
    return [number for name in names for number in read_metric(config, name)]
