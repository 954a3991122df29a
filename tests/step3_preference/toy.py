"""A tiny actor, with pairs and labeled responses to train it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import DataConfig, OptimConfig, TrainedModelConfig
from step3_preference.config import METHODS, PreferenceConfig
from tests.families import save_base

PAIRS = [
    {
        "prompt": f"Add {n} and 1.",
        "chosen": f"Sure! It is {n + 1}.",
        "rejected": f"Go away. It is {n + 2}, as everybody knows.",
    }
    for n in range(40)
]
LABELED = [
    {"prompt": f"Add {n} and 2.", "completion": f"{text} {n + 2}.", "label": label}
    for n in range(20)
    for text, label in (("Sure!", True), ("Whatever.", False))
]


def save_toy(directory: Path, *, blocks: int = 2) -> None:
    """Save a random actor and the rows that `toy_config` names."""
    save_base(directory / "actor", seed=1, num_hidden_layers=blocks)
    write_rows(directory / "pairs.jsonl", PAIRS)
    write_rows(directory / "labeled.jsonl", LABELED)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def toy_config(directory: Path, method: str = "dpo", **changes: Any) -> PreferenceConfig:
    """Return settings of a method for four steps of eight pairs."""
    data: Mapping[str, Any] = {
        "path": (str(directory / "pairs.jsonl"),),
        "max_length": 64,
        "split": (0.0, 1.0, 1.0),
        "max_eval_rows": 4,
        **changes.pop("data", {}),
    }
    model = {
        "path": str(directory / "actor"),
        "optim": OptimConfig(lr=1e-3, schedule="constant", warmup_ratio=0.0),
        **changes.pop("model", {}),
    }
    settings = {
        "output_dir": directory / "out",
        "method": method,
        "data": DataConfig(**data),
        "model": TrainedModelConfig(**model),
        "max_steps": 4,
        "batch_size": 8,
        "micro_batch_size": 4,
        "max_prompt_length": 48,
        "max_new_tokens": 6,
        "eval_every": 2,
    }
    return PreferenceConfig(**{**settings, **METHODS[method], **changes})
