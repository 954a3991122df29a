"""Step 2 on pairs: accuracy, learning, and equal figures on two processes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import (
    DataConfig,
    FrozenModelConfig,
    LoraConfig,
    OptimConfig,
    TrainedModelConfig,
)
from pipeline.models.forward.forward import Scorer
from pipeline.models.hf.load import load_classifier
from step2_reward.config import RewardConfig
from step2_reward.labels import Labels
from step2_reward.objectives import PairObjective
from step2_reward.rows import Row, collate_rows
from step2_reward.train import train
from tests.distributed import run_ranks
from tests.families import random_rows, save_base
from tests.step2_reward.labeled import train_and_read
from tests.test_resume import read_metric

CPU = torch.device("cpu")


def small_task(directory: Path, **changes: Any) -> RewardConfig:
    """Return settings for a tiny random Llama and forty pairs with better polite responses."""
    save_base(directory / "base")
    rows = [
        {
            "prompt": f"Add {n} and 1.",
            "chosen": f"Sure! It is {n + 1}.",
            "rejected": f"Go away. It is {n + 1}, as everybody knows.",
        }
        for n in range(40)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    optim = OptimConfig(lr=0.003, schedule="constant", warmup_ratio=0.0)
    settings: dict[str, Any] = {
        "output_dir": directory / "out",
        "model": TrainedModelConfig(path=str(directory / "base"), optim=optim),
        "data": DataConfig(path=(str(directory / "rows.jsonl"),), max_length=64),
        "max_steps": 3,
        "batch_size": 8,
        "micro_batch_size": 8,
    }
    return RewardConfig(**{**settings, **changes})


@torch.no_grad()
def test_accuracy_is_the_fraction_of_correctly_ordered_pairs(tmp_path: Path) -> None:
    config = small_task(tmp_path)
    model = load_classifier(FrozenModelConfig(path=config.model.path), device=CPU, num_labels=1)
    first, second = random_rows((4, 6))
    scores = Scorer(model).final_scores(collate_rows([Row((first, second), (0.0,))], [0]).tokens)
    better, worse = (first, second) if scores[0] > scores[1] else (second, first)
    high, low = scores.max().item(), scores.min().item()

    objective = PairObjective(Labels("pairs", "bradley_terry"), config)
    pairs = ((better, worse), (better, worse), (worse, better))
    figures, _ = objective.evaluate(Scorer(model), [Row(p, (0.0,)) for p in pairs], config)

    assert figures["accuracy"] == 2 / 3
    assert figures["mean_chosen"] == pytest.approx((2 * high + low) / 3, rel=1e-5)
    assert figures["mean_rejected"] == pytest.approx((2 * low + high) / 3, rel=1e-5)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, lr=0.02)])
def test_training_learns_the_better_response(tmp_path: Path, lora: LoraConfig | None) -> None:
    config = small_task(tmp_path, max_steps=12, batch_size=16, micro_batch_size=16)
    config = replace(config, model=replace(config.model, lora=lora))

    train(config)

    report = json.loads((config.output_dir / "result.json").read_text())["eval"]
    assert report["accuracy_after"] == 1.0
    assert report["mean_chosen"] > report["mean_rejected"]
    losses = read_metric(config, "loss")
    assert losses[0] > 0.5
    assert losses[-1] < 0.2
    assert set(read_metric(config, "lr")) == {0.02 if lora else 0.003}


@pytest.mark.jobs
def test_figures_on_two_processes_match_one_process(tmp_path: Path) -> None:
    """With five pairs per step the processes never have equally many."""
    config = small_task(tmp_path, batch_size=5)
    expected = train_and_read(replace(config, output_dir=tmp_path / "alone"))

    first, second = run_ranks(train_and_read, replace(config, output_dir=tmp_path / "together"))

    assert first == second == pytest.approx(expected, rel=1e-3, abs=1e-5)
