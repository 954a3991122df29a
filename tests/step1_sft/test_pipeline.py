"""Step 1 with pipeline parallelism matches one process bitwise."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import LoraConfig, ParallelConfig
from pipeline.config.model import ZeroConfig
from pipeline.engine.checkpoint.__main__ import main as checkpoints
from pipeline.models.forward.vocab_parallel import LARGE
from pipeline.parallel.mesh import split_mesh
from pipeline.run.run import Run
from pipeline.run.training import load_rows
from step1_sft.batches import encode, split_rows
from step1_sft.config import SFTConfig
from step1_sft.train import load_model, take_step
from tests.distributed import run_ranks
from tests.jobs import run_job
from tests.step1_sft.small_runs import interrupt, make_config, outcome, read_state, run, write_task

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "untied": ("llama", {}, {"precision": "fp32"}),
    "tied, bf16, checkpointing": (
        "llama",
        {"tie_word_embeddings": True, "vocab_size": LARGE},
        {"precision": "bf16", "gradient_checkpointing": True, "zero_stage": 1},
    ),
    "tied gpt2, fp16": ("gpt2", {}, {"precision": "fp16"}),
    "adapters": ("opt", {}, {"lora": LoraConfig(rank=2), "precision": "bf16", "zero_stage": 1}),
    "projections, adapters": (
        "opt",
        {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
        {"lora": LoraConfig(rank=2)},
    ),
    "adapters, 4 bits": (
        "llama",
        {"hidden_size": 64, "intermediate_size": 128},
        {"lora": LoraConfig(rank=2), "quantize": "nf4"},
    ),
}


SHORT = ("tied, bf16, checkpointing", "adapters")
"""Cases of the default test run; the others are in the grid."""


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in SHORT else pytest.mark.grid) for n in CASES]
)
def test_two_pipeline_stages_match_one_process_bitwise(case: str, tmp_path: Path) -> None:
    family, changes, model = CASES[case]
    task = write_task(tmp_path, family, **changes)
    run(make_config(task, tmp_path / "alone", pp=1, model=model))

    run_ranks(run, make_config(task, tmp_path / "staged", pp=2, model=model))

    assert outcome(tmp_path / "staged") == outcome(tmp_path / "alone")
    bubbles = [
        json.loads(line)["bubble"]
        for line in (tmp_path / "staged" / "metrics.jsonl").read_text().splitlines()
        if "loss" in json.loads(line)
    ]
    assert len(bubbles) == 3
    assert all(0 < bubble < 1 for bubble in bubbles)


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    # Processes, parallel settings, model settings, and processes of the reference run.
    "one micro-batch": (2, {"micro_batches": 1}, {}, 1),
    "three stages": (3, {"pp": 3, "micro_batches": 5}, {}, 1),
    "two pipelines": (4, {}, {"zero_stage": 2}, 2),
    "two pipelines, replicas": (4, {"replicas": 2}, {"zero_stage": 1}, 2),
    "deterministic": (2, {"micro_batches": 4}, {"zero": ZeroConfig(reduction="deterministic")}, 1),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", LAYOUTS)
def test_pipelines_with_data_parallelism_match_data_parallelism(name: str, tmp_path: Path) -> None:
    world, changes, model, reference_world = LAYOUTS[name]
    task = write_task(tmp_path, "llama", tie_word_embeddings=True)
    parallel = ParallelConfig(**{"pp": 2, "micro_batches": 3, **changes})
    plain = replace(parallel, pp=1, replicas=1)
    reference = make_config(task, tmp_path / "alone", pp=1, model=model, parallel=plain)
    run_ranks(run, reference, world_size=reference_world)

    staged = make_config(task, tmp_path / "staged", pp=2, model=model, parallel=parallel)
    run_ranks(run, staged, world_size=world)

    assert outcome(tmp_path / "staged") == outcome(tmp_path / "alone")


@pytest.mark.jobs
def test_checkpoint_resumes_on_other_numbers_of_stages_bitwise(tmp_path: Path) -> None:
    task = write_task(tmp_path, "gpt2", blocks=4)
    common: dict[str, Any] = {"save_every": 1, "keep_last": 9, "model": {"precision": "bf16"}}
    run(make_config(task, tmp_path / "alone", pp=1, **common))
    run_ranks(run, make_config(task, tmp_path / "staged", pp=2, **common))
    expected = outcome(tmp_path / "alone")

    one, two, three = (ParallelConfig(pp=pp, micro_batches=3) for pp in (1, 2, 3))
    for source, parallel in (("alone", two), ("staged", one), ("staged", three)):
        out = interrupt(tmp_path / source, tmp_path / f"{source} to {parallel.pp}")
        config = make_config(task, out, parallel=parallel, resume=True, **common)
        run_ranks(run, config, world_size=parallel.pp)

        assert outcome(out) == expected
        last = read_state(out, 3)
        assert last.keys() == read_state(tmp_path / "alone", 3).keys()
        assert all(torch.equal(last[k], v) for k, v in read_state(tmp_path / "alone", 3).items())

    newest = tmp_path / "staged" / "checkpoints" / "step_00000003"
    checkpoints(["consolidate", str(newest), str(tmp_path / "c")])
    consolidated = load_file(tmp_path / "c" / "model.safetensors")
    model = load_file(tmp_path / "alone" / "model.safetensors")
    assert consolidated.keys() == model.keys()


def overflow_steps(config: SFTConfig, skips: list[int]) -> list[bool]:
    """Take two optimizer steps, the first with a non-finite gradient on the last stage only."""
    with split_mesh(replicas=1, pp=2, timeout_seconds=60.0) as mesh:
        rows = load_rows(config, config.model, step=1)
        with Run(config, name="step1_sft", total_steps=2, mesh=mesh) as run:
            sft = load_model(config, rows, run)
            skipped: list[bool] = []
            for step in range(2):
                batch = encode(rows.next_examples(), rows.chat, config)
                factor = torch.inf if step in skips else 1.0
                sft.passes.forward_backward(
                    split_rows(batch, config),
                    lambda batch, factor=factor: (
                        -factor * sft.engine(batch, uniform=True).logprobs.sum()
                    ),
                    divisor=100.0,
                )
                skipped.append(sft.engine.step().skipped)
    return skipped


def test_non_finite_gradient_on_one_stage_skips_the_step_on_all(tmp_path: Path) -> None:
    config = make_config(write_task(tmp_path, "llama"), tmp_path / "out", pp=2)

    assert run_ranks(overflow_steps, config, [0]) == [[True, False]] * 2


def train_with_hang(config: SFTConfig, rank: int) -> None:
    """Train with one rank that sleeps in a forward pass."""
    parallel = config.parallel
    with split_mesh(replicas=1, pp=parallel.pp, tp=parallel.tp, timeout_seconds=30.0) as mesh:
        rows = load_rows(config, config.model, step=1)
        with Run(config, name="step1_sft", total_steps=1, mesh=mesh) as run:
            sft = load_model(config, rows, run)
            if mesh.world.rank == rank:
                sft.engine.model.register_forward_pre_hook(lambda *_: time.sleep(1000))
            take_step(sft, encode(rows.next_examples(), rows.chat, config), run, step=1)


@pytest.mark.jobs
@pytest.mark.parametrize(("pp", "tp"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.faults)])
def test_hanging_stage_is_named_by_the_waiting_ranks(pp: int, tp: int, tmp_path: Path) -> None:
    config = make_config(write_task(tmp_path, "llama"), tmp_path / "out", pp=pp, tp=tp)
    last = pp * tp - 1

    job = run_job(train_with_hang, config, last, world_size=pp * tp, timeout_seconds=3)

    assert job.codes == [1] * (pp * tp)
    assert re.search(rf"rank {last} hangs: rank \d waited \d+ s for it", job.errors)
    assert all(f"rank {other} hangs" not in job.errors for other in range(last))
    assert any(f"rank {other} stopped because" in job.errors for other in range(last))
