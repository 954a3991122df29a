"""Step 2 with pipeline parallelism matches one process bitwise."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import DataConfig, LoraConfig, OptimConfig, ParallelConfig, TrainedModelConfig
from step2_reward.config import RewardConfig
from step2_reward.train import train
from tests.distributed import run_ranks
from tests.families import save_base
from tests.staged import hash_weights, remove_last_checkpoint, require_less_memory, train_sharded
from tests.step2_reward.labeled import make_rows, write_jsonl

run = partial(train_sharded, train)


def make_config(
    directory: Path, out: Path, *, pp: int, model: Any = None, **parallel: Any
) -> RewardConfig:
    optim = OptimConfig(lr=0.003, schedule="constant", warmup_ratio=0.0, max_grad_norm=0.5)
    return RewardConfig(
        output_dir=out,
        model=TrainedModelConfig(path=str(directory / "base"), optim=optim, **(model or {})),
        data=DataConfig(
            path=(str(directory / "rows.jsonl"),),
            max_length=48,
            split=(0, 1, 0),
            eval_fraction=0.25,
        ),
        parallel=ParallelConfig(pp=pp, micro_batches=3, **parallel),
        max_steps=3,
        batch_size=8,
        micro_batch_size=8,
        save_every=1,
    )


def read_outcome(out: Path) -> dict[str, Any]:
    """Return all outputs of the step that don't depend on time."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = {"step", "loss", "accuracy", "grad_norm", "skipped"}
    return {
        "weights": hash_weights(out),
        "metrics": [
            {name: line[name] for name in line if name in names or name.startswith("eval_")}
            for line in lines
        ],
        "eval": json.loads((out / "result.json").read_text())["eval"],
        "config": json.loads((out / "config.json").read_text()),
        "predictions": (out / "predictions.jsonl").read_text(),
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pairs": ("pairs", {}),
    "ratings, bf16": ("scalar", {"precision": "bf16", "zero_stage": 1}),
    "classes, adapters": ("classes", {"lora": LoraConfig(rank=2)}),
    "ratings, checkpointing": ("scalar", {"gradient_checkpointing": True}),
    "steps": ("steps", {}),
    "pairs, fp16": ("pairs", {"precision": "fp16"}),
    "pairs, OPT 350m": ("pairs", {"precision": "bf16"}),
    "classes, adapters, OPT 350m": ("classes", {"lora": LoraConfig(rank=2)}),
}
OPT_350M = {"family": "opt", "word_embed_proj_dim": 16, "do_layer_norm_before": False}
TIERS: dict[str, Any] = {"pairs": (), "classes, adapters": pytest.mark.jobs}
"""Default cases; the others run in the grid tier."""


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=TIERS.get(name, pytest.mark.grid)) for name in CASES]
)
def test_two_stages_match_one_process_bitwise(case: str, tmp_path: Path) -> None:
    kind, model = CASES[case]
    family = OPT_350M if case.endswith("OPT 350m") else {}
    save_base(tmp_path / "base", num_hidden_layers=2, **family)
    write_jsonl(tmp_path / "rows.jsonl", make_rows(kind))
    single = make_config(tmp_path, tmp_path / "alone", pp=1, model=model)
    staged = make_config(tmp_path, tmp_path / "staged", pp=2, model=model)
    run(single)

    run_ranks(run, staged)

    assert read_outcome(staged.output_dir) == read_outcome(single.output_dir)
    remove_last_checkpoint(staged.output_dir, last=3)
    run(replace(staged, parallel=single.parallel, resume=True))
    assert read_outcome(staged.output_dir) == read_outcome(single.output_dir)
    require_less_memory(staged, single)
