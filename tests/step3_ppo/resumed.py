"""Run step 3 fully, and again with an interruption after the first iteration."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from step3_ppo.config import PPOConfig
from step3_ppo.train import train


def run_full_and_resumed(
    config: PPOConfig, directory: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run two iterations with checkpoints; return the metrics of the full and the resumed run."""
    full, resumed = directory / "full", directory / "resumed"
    train(replace(config, output_dir=full))
    shutil.copytree(full, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_00000002")
    (resumed / "result.json").unlink()
    train(replace(config, output_dir=resumed, resume=True))
    first, second = (
        [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (full, resumed)
    )
    return first, second
