"""Step 1 through the stages of a pipeline ends as on one process, bit for bit."""

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
from pipeline.parallel.mesh import cut_mesh
from pipeline.run.run import Run
from pipeline.run.training import load_rows
from step1_sft.batches import cut, encode
from step1_sft.config import SFTConfig
from step1_sft.train import learn_from, load_model
from tests.distributed import run_ranks
from tests.jobs import run_job
from tests.step1_sft.small_runs import cut_off, ended, make, run, saved, settings

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


SOME = ("tied, bf16, checkpointing", "adapters")
"""That every run of the tests goes through; the others are the grid."""


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in SOME else pytest.mark.grid) for n in CASES]
)
def test_two_stages_end_as_one_process(case: str, tmp_path: Path) -> None:
    family, changes, model = CASES[case]
    start = make(tmp_path, family, **changes)
    run(settings(start, tmp_path / "alone", pp=1, model=model))

    run_ranks(run, settings(start, tmp_path / "staged", pp=2, model=model))

    assert ended(tmp_path / "staged") == ended(tmp_path / "alone")
    bubbles = [
        json.loads(line)["bubble"]
        for line in (tmp_path / "staged" / "metrics.jsonl").read_text().splitlines()
        if "loss" in json.loads(line)
    ]
    assert len(bubbles) == 3
    assert all(0 < bubble < 1 for bubble in bubbles)


MIXTURES: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    # Processes, division, model, and the processes of the run that it is compared with.
    "one micro-batch": (2, {"micro_batches": 1}, {}, 1),
    "three stages": (3, {"pp": 3, "micro_batches": 5}, {}, 1),
    "two pipelines": (4, {}, {"zero_stage": 2}, 2),
    "two pipelines, replicas": (4, {"replicas": 2}, {"zero_stage": 1}, 2),
    "deterministic": (
        2,
        {"micro_batches": 4},
        {"zero": ZeroConfig(reduction="deterministic", shared_memory=False)},
        1,
    ),
}


@pytest.mark.jobs
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SOME else pytest.mark.grid) for n in MIXTURES]
)
def test_mixtures_end_as_data_parallelism(name: str, tmp_path: Path) -> None:
    world, division, model, other = MIXTURES[name]
    start = make(tmp_path, "llama", tie_word_embeddings=True)
    parallel = ParallelConfig(**{"pp": 2, "micro_batches": 3, **division})
    plain = replace(parallel, pp=1, replicas=1)
    alone = settings(start, tmp_path / "alone", pp=1, model=model, parallel=plain)
    run_ranks(run, alone, world_size=other)

    staged = settings(start, tmp_path / "staged", pp=2, model=model, parallel=parallel)
    run_ranks(run, staged, world_size=world)

    assert ended(tmp_path / "staged") == ended(tmp_path / "alone")


@pytest.mark.jobs
def test_a_run_of_any_stages_goes_on_in_any_other_to_the_bit(tmp_path: Path) -> None:
    start = make(tmp_path, "gpt2", blocks=4)
    often: dict[str, Any] = {"save_every": 1, "keep_last": 9, "model": {"precision": "bf16"}}
    run(settings(start, tmp_path / "alone", pp=1, **often))
    run_ranks(run, settings(start, tmp_path / "staged", pp=2, **often))
    expected = ended(tmp_path / "alone")

    one, two, three = (ParallelConfig(pp=pp, micro_batches=3) for pp in (1, 2, 3))
    for source, parallel in (("alone", two), ("staged", one), ("staged", three)):
        out = cut_off(tmp_path / source, tmp_path / f"{source} to {parallel.pp}")
        config = settings(start, out, parallel=parallel, resume=True, **often)
        run_ranks(run, config, world_size=parallel.pp)

        assert ended(out) == expected
        last = saved(out, 3)
        assert last.keys() == saved(tmp_path / "alone", 3).keys()
        assert all(torch.equal(last[k], each) for k, each in saved(tmp_path / "alone", 3).items())

    newest = tmp_path / "staged" / "checkpoints" / "step_00000003"
    checkpoints(["consolidate", str(newest), str(tmp_path / "c")])
    made = load_file(tmp_path / "c" / "model.safetensors")
    model = load_file(tmp_path / "alone" / "model.safetensors")
    assert made.keys() == model.keys()


def overflows(config: SFTConfig, skips: list[int]) -> list[bool]:
    """Two optimizer steps, the gradient of the first not finite on the last stage alone."""
    with cut_mesh(replicas=1, pp=2, timeout_seconds=60.0) as mesh:
        rows = load_rows(config, config.model, step=1)
        with Run(config, name="step1_sft", total_steps=2, mesh=mesh) as opened:
            sft = load_model(config, rows, opened)
            skipped: list[bool] = []
            for step in range(2):
                batch = encode(rows.next_examples(), rows.chat, config)
                factor = torch.inf if step in skips else 1.0
                sft.passes.learn(
                    cut(batch, config),
                    lambda each, factor=factor: (
                        -factor * sft.engine(each, uniform=True).logprobs.sum()
                    ),
                    divisor=100.0,
                )
                skipped.append(sft.engine.step().skipped)
    return skipped


def test_a_gradient_that_is_not_finite_on_one_stage_skips_the_step_on_all(tmp_path: Path) -> None:
    config = settings(make(tmp_path, "llama"), tmp_path / "out", pp=2)

    assert run_ranks(overflows, config, [0]) == [[True, False]] * 2


def hangs(config: SFTConfig, rank: int) -> None:
    """A process of the last stage goes to sleep in a forward pass."""
    cut = config.parallel
    with cut_mesh(replicas=1, pp=cut.pp, tp=cut.tp, timeout_seconds=30.0) as mesh:
        rows = load_rows(config, config.model, step=1)
        with Run(config, name="step1_sft", total_steps=1, mesh=mesh) as opened:
            sft = load_model(config, rows, opened)
            if mesh.world.rank == rank:
                sft.engine.model.register_forward_pre_hook(lambda *_: time.sleep(1000))
            learn_from(sft, encode(rows.next_examples(), rows.chat, config), opened, step=1)


@pytest.mark.jobs
@pytest.mark.parametrize(("pp", "tp"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.faults)])
def test_a_stage_that_hangs_is_named_through_those_that_wait_for_each_other(
    pp: int, tp: int, tmp_path: Path
) -> None:
    config, last = settings(make(tmp_path, "llama"), tmp_path / "out", pp=pp, tp=tp), pp * tp - 1

    job = run_job(hangs, config, last, world_size=pp * tp, timeout_seconds=3)

    assert job.codes == [1] * (pp * tp)
    assert re.search(rf"rank {last} hangs: rank \d waited \d+ s for it", job.errors)
    assert all(f"rank {other} hangs" not in job.errors for other in range(last))
    assert any(f"rank {other} stopped because" in job.errors for other in range(last))
