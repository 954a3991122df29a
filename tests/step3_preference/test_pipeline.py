"""Preference methods through the stages of a pipeline end as on one process, to the bit."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import LoraConfig, ParallelConfig
from pipeline.parallel.mesh import cut_mesh
from step3_preference.config import PreferenceConfig
from step3_preference.train import train
from tests.distributed import run_ranks
from tests.staged import lose_the_end, require_less_memory
from tests.step3_preference.toy import metrics, toy_config

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {}),
    "kto, adapters, bf16": ("kto", {"lora": LoraConfig(rank=2), "precision": "bf16"}),
    "orpo, checkpointing, stage 2": ("orpo", {"gradient_checkpointing": True, "zero_stage": 2}),
    "simpo, fp16": ("simpo", {"precision": "fp16"}),
    "kto": ("kto", {"zero_stage": 1}),
    "dpo, adapters": ("dpo", {"lora": LoraConfig(rank=2)}),
}
SOME = ("kto, adapters, bf16",)
"""That every run of the tests goes through; the others are the grid."""


def run(config: PreferenceConfig) -> None:
    division = config.parallel
    with cut_mesh(replicas=division.replicas, pp=division.pp, tp=division.tp, timeout_seconds=60.0):
        train(config)


def settings(toy: Path, out: Path, method: str, *, pp: int, **changes: Any) -> PreferenceConfig:
    division = {"pp": pp, "micro_batches": 3, **changes.pop("parallel", {})}
    own = {"eval_prompts": 4, "save_every": 2, "nll_coef": 0.1, "max_steps": 3, **changes}
    if method == "kto":
        own["data"] = {"path": (str(toy / "labelled.jsonl"),)}
    return toy_config(toy, method, output_dir=out, parallel=ParallelConfig(**division), **own)


def ended(out: Path) -> dict[str, Any]:
    """The weights, what was logged and written, but for what the clock says."""
    return {
        "weights": {
            str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(out.rglob("*.safetensors"))
            if "checkpoints" not in file.parts
        },
        "metrics": [
            {name: each for name, each in line.items() if name != "bubble"} for line in metrics(out)
        ],
        "eval": json.loads((out / "result.json").read_text())["eval"],
        "samples": (out / "samples.json").read_text(),
    }


@pytest.mark.jobs
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in SOME else pytest.mark.grid) for n in CASES]
)
def test_two_stages_end_as_one_process(case: str, toy: Path, tmp_path: Path) -> None:
    method, model = CASES[case]
    alone = settings(toy, tmp_path / "alone", method, pp=1, model=model)
    staged = settings(toy, tmp_path / "staged", method, pp=2, model=model)
    run(alone)

    run_ranks(run, staged)

    assert ended(staged.output_dir) == ended(alone.output_dir)
    assert all(0 < line["bubble"] < 1 for line in metrics(staged.output_dir) if "lr" in line)
    lose_the_end(staged.output_dir, last=3)
    run(replace(staged, parallel=alone.parallel, resume=True))
    assert ended(staged.output_dir) == ended(alone.output_dir)
    require_less_memory(staged, alone)


MIXTURES: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    # Processes, division, model, and the processes of the run that it is compared with.
    "with parts of each layer": (4, {"tp": 2}, {}, 2),
    "two pipelines, replicas": (4, {"replicas": 2}, {"zero_stage": 1}, 2),
    "two pipelines": (4, {}, {"zero_stage": 2}, 2),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_end_as_the_same_without_stages(name: str, toy: Path, tmp_path: Path) -> None:
    world, division, model, other = MIXTURES[name]
    plain = {**division, "replicas": 1}
    alone = settings(toy, tmp_path / "alone", "dpo", pp=1, model=model, parallel=plain)
    staged = settings(toy, tmp_path / "staged", "dpo", pp=2, model=model, parallel=division)
    run_ranks(run, alone, world_size=other)

    run_ranks(run, staged, world_size=world)

    assert ended(staged.output_dir) == ended(alone.output_dir)
