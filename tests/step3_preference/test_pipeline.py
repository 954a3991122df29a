"""Preference methods with pipeline parallelism match one process bitwise."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import LoraConfig, ParallelConfig
from step3_preference.config import PreferenceConfig
from step3_preference.train import train
from tests.distributed import run_ranks
from tests.staged import hash_weights, remove_last_checkpoint, require_less_memory, train_sharded
from tests.step3_preference.toy import toy_config
from tests.test_resume import read_metrics

run = partial(train_sharded, train)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {}),
    "kto, adapters, bf16": ("kto", {"lora": LoraConfig(rank=2), "precision": "bf16"}),
    "orpo, checkpointing, stage 2": ("orpo", {"gradient_checkpointing": True, "zero_stage": 2}),
    "simpo, fp16": ("simpo", {"precision": "fp16"}),
    "kto": ("kto", {"zero_stage": 1}),
    "dpo, adapters": ("dpo", {"lora": LoraConfig(rank=2)}),
}
SHORT = ("kto, adapters, bf16",)
"""Cases of the default test run; the others are in the grid."""


def make_config(toy: Path, out: Path, method: str, *, pp: int, **changes: Any) -> PreferenceConfig:
    parallel = {"pp": pp, "micro_batches": 3, **changes.pop("parallel", {})}
    settings = {"eval_prompts": 4, "save_every": 2, "nll_coef": 0.1, "max_steps": 3, **changes}
    if method == "kto":
        settings["data"] = {"path": (str(toy / "labeled.jsonl"),)}
    return toy_config(toy, method, output_dir=out, parallel=ParallelConfig(**parallel), **settings)


def read_outcome(out: Path) -> dict[str, Any]:
    """Return all outputs that don't depend on time."""
    return {
        "weights": hash_weights(out),
        "metrics": read_metrics(out),
        "eval": json.loads((out / "result.json").read_text())["eval"],
        "samples": (out / "samples.json").read_text(),
    }


@pytest.mark.jobs
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in SHORT else pytest.mark.grid) for n in CASES]
)
def test_two_stages_match_one_process_bitwise(case: str, toy: Path, tmp_path: Path) -> None:
    method, model = CASES[case]
    single = make_config(toy, tmp_path / "alone", method, pp=1, model=model)
    staged = make_config(toy, tmp_path / "staged", method, pp=2, model=model)
    run(single)

    run_ranks(run, staged)

    assert read_outcome(staged.output_dir) == read_outcome(single.output_dir)
    lines = (staged.output_dir / "metrics.jsonl").read_text().splitlines()
    assert all(0 < json.loads(line)["bubble"] < 1 for line in lines if '"lr"' in line)
    remove_last_checkpoint(staged.output_dir, last=3)
    run(replace(staged, parallel=single.parallel, resume=True))
    assert read_outcome(staged.output_dir) == read_outcome(single.output_dir)
    require_less_memory(staged, single)


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    # Processes, parallel settings, model settings, and processes of the reference run.
    "tensor parallelism": (4, {"tp": 2}, {}, 2),
    "two pipelines, replicas": (4, {"replicas": 2}, {"zero_stage": 1}, 2),
    "two pipelines": (4, {}, {"zero_stage": 2}, 2),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_with_stages_match_those_without(name: str, toy: Path, tmp_path: Path) -> None:
    world, parallel, model, reference_world = LAYOUTS[name]
    plain = {**parallel, "replicas": 1}
    reference = make_config(toy, tmp_path / "alone", "dpo", pp=1, model=model, parallel=plain)
    staged = make_config(toy, tmp_path / "staged", "dpo", pp=2, model=model, parallel=parallel)
    run_ranks(run, reference, world_size=reference_world)

    run_ranks(run, staged, world_size=world)

    assert read_outcome(staged.output_dir) == read_outcome(reference.output_dir)
