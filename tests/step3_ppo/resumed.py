"""A run of step 3, and the same run interrupted after its first iteration and resumed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from step3_ppo.config import PPOConfig
from step3_ppo.train import train


def run_whole_and_resumed(
    config: PPOConfig, directory: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of metrics.jsonl of both; of two iterations, with a checkpoint after each.

    They are `directory / "whole"` and `directory / "again"`.
    """
    whole, again = directory / "whole", directory / "again"
    train(replace(config, output_dir=whole))
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step_00000002")
    (again / "result.json").unlink()
    train(replace(config, output_dir=again, resume=True))
    first, second = (
        [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (whole, again)
    )
    return first, second
