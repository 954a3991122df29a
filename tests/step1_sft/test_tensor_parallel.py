"""Step 1 with layers that several processes compute together learns what one process does."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.config import LoraConfig, ParallelConfig
from pipeline.config.model import ZeroConfig
from pipeline.engine.checkpoint.__main__ import main as checkpoints
from pipeline.models.forward.vocab_parallel import LARGE
from pipeline.parallel.mesh import cut_mesh
from pipeline.run.run import Run
from pipeline.run.training import load_rows
from step1_sft.batches import cut, encode
from step1_sft.config import SFTConfig
from step1_sft.train import load_model
from tests.distributed import run_ranks
from tests.step1_sft.small_runs import cut_off, ended, make, run, saved, settings

NF4 = {"quantize": "nf4"}
WIDE = {"hidden_size": 128, "intermediate_size": 128}
"""Widths whose halves are full blocks of 64 weights."""

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    # Family, its changes, settings of the model, and how far losses may be apart.
    "grouped heads, untied": ("llama", {}, {"precision": "fp32"}, 1e-6),
    "adapters, stage 3": ("gpt2", {}, {"lora": LoraConfig(rank=2), "zero_stage": 3}, 1e-6),
    "norms of heads, biases": ("qwen3", {"attention_bias": True}, {"zero_stage": 2}, 2e-6),
    "tied, padded": ("gemma2", {}, {"precision": "fp32"}, 1e-6),
    "tied, bf16, checkpointing": (
        "llama",
        {"tie_word_embeddings": True},
        {"precision": "bf16", "gradient_checkpointing": True, "zero_stage": 3},
        3e-3,
    ),
    "tied, fp16, adapters": ("opt", {}, {"precision": "fp16", "lora": LoraConfig(rank=2)}, 1e-3),
    "4 bits, packed layers, biases, stage 3": (
        "gpt2",
        {"n_embd": 128},
        {"lora": LoraConfig(rank=2, lr=0.001), **NF4, "zero_stage": 3},
        1e-6,
    ),
    "8 bits, padded": (
        "gemma2",
        {**WIDE, "head_dim": 32},
        {"lora": LoraConfig(rank=2, lr=0.001), "quantize": "int8"},
        2e-6,
    ),
    "4 bits, bf16, checkpointing": (
        "opt",
        {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 128},
        {
            "lora": LoraConfig(rank=2, lr=0.001),
            **NF4,
            "precision": "bf16",
            "gradient_checkpointing": True,
        },
        3e-3,
    ),
}
SOME = ("grouped heads, untied", "adapters, stage 3", "4 bits, packed layers, biases, stage 3")
"""That every run of the tests goes through; the others are the grid."""


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in SOME else pytest.mark.grid) for n in CASES]
)
def test_two_processes_learn_what_one_does(case: str, tmp_path: Path) -> None:
    family, changes, model, bound = CASES[case]
    start = make(tmp_path, family, **changes)
    run(settings(start, tmp_path / "alone", model=model))

    run_ranks(run, settings(start, tmp_path / "together", tp=2, model=model))

    alone, together = (ended(tmp_path / name) for name in ("alone", "together"))
    for expected, line in zip(alone["metrics"], together["metrics"], strict=True):
        assert line.keys() == expected.keys()
        for name in expected:
            far = 100 if name == "grad_norm" else 20  # after steps that rounding changed
            found, wanted = line[name], expected[name]
            if name == "eval_perplexity":  # whose logarithm is a loss
                found, wanted = math.log(found), math.log(wanted)
            assert found == pytest.approx(wanted, rel=far * bound), name
    first, after = together["metrics"][1], alone["metrics"][1]
    assert first["loss"] == pytest.approx(after["loss"], rel=bound)
    assert first["grad_norm"] == pytest.approx(after["grad_norm"], rel=5 * bound)
    assert together["weights"].keys() == alone["weights"].keys()
    model_of = AutoModelForCausalLM.from_pretrained
    whole, expected = model_of(tmp_path / "together"), model_of(tmp_path / "alone")
    ids = torch.arange(3, 30)[None]
    found, wanted = whole(ids).logits.float(), expected(ids).logits.float()
    # AdamW's first steps go by the sign of a gradient: in 16 bits, where rounding turns that of
    # small ones, weights of one process are as far from those of fp32 as from these.
    if bound < 1e-5:
        assert (found - wanted).norm() <= 20 * bound * wanted.norm()
    adapter = tmp_path / "together" / "adapter"
    is_quantized = "quantize" in model  # over whose dequantized base alone the adapter fits
    if adapter.exists() and bound < 1e-5 and not is_quantized:  # as peft has it, on the base
        adapted = PeftModel.from_pretrained(model_of(start / "base"), str(adapter))
        torch.testing.assert_close(adapted(ids).logits, found, rtol=1e-4, atol=1e-5)
    shape = {"processes": 2, "stages": 1, "tensor": 2, "replicas": 1, "shards": 1}
    assert json.loads((tmp_path / "together" / "result.json").read_text())["mesh"] == shape


TREE = {"zero": ZeroConfig(reduction="deterministic"), "precision": "bf16"}
MIXTURES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # Processes, sharding, and settings of the model, with two processes per layer.
    "stages": (
        4,
        {"pp": 2},
        {"precision": "bf16", "zero_stage": 1, "gradient_checkpointing": True},
    ),
    "shards": (4, {"micro_batches": 2}, {**TREE, "zero_stage": 3}),
    "replicas": (4, {"micro_batches": 2, "replicas": 2}, {**TREE, "zero_stage": 2}),
    "stages of 4 bits": (4, {"pp": 2}, {**NF4, "lora": LoraConfig(rank=2), "zero_stage": 1}),
    "shards of 8 bits": (
        4,
        {"micro_batches": 2},
        {**TREE, "lora": LoraConfig(rank=2), "quantize": "int8", "zero_stage": 3},
    ),
}


@pytest.mark.jobs
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "stages" else pytest.mark.grid) for n in MIXTURES]
)
def test_mixtures_end_in_the_bits_of_two_processes(name: str, tmp_path: Path) -> None:
    world, division, model = MIXTURES[name]
    wide = {**WIDE, "head_dim": 32} if "quantize" in model else {}
    start = make(tmp_path, "qwen3", tie_word_embeddings=True, vocab_size=LARGE, **wide)
    parallel = ParallelConfig(tp=2, micro_batches=4)
    plain = settings(start, tmp_path / "plain", parallel=parallel, model=model, max_steps=2)
    run_ranks(run, plain)

    mixed = replace(plain, output_dir=tmp_path / "mixed", parallel=replace(parallel, **division))
    run_ranks(run, mixed, world_size=world)

    assert ended(tmp_path / "mixed") == ended(tmp_path / "plain")


def take_up(config: SFTConfig, step: int) -> None:
    """Load the newest state of a run, and save it again under another step."""
    parallel = config.parallel
    with cut_mesh(replicas=1, pp=parallel.pp, tp=parallel.tp, timeout_seconds=60.0) as mesh:
        rows = load_rows(config, config.model, step=1)
        with Run(config, name="step1_sft", total_steps=3, mesh=mesh) as opened:
            checkpoints = load_model(config, rows, opened).checkpoints
            assert checkpoints.done == step - 1
            checkpoints.save(step)
            assert list(checkpoints.steps(enough=lambda: True)) == []  # waits for the files


STATES: dict[str, dict[str, Any]] = {
    "whole weights": {"precision": "bf16"},
    "4 bits": {"precision": "bf16", "lora": LoraConfig(rank=2), **NF4},
}


@pytest.mark.grid
@pytest.mark.parametrize("name", STATES)
def test_a_state_of_any_division_is_taken_up_by_any_other(name: str, tmp_path: Path) -> None:
    start = make(tmp_path, "gpt2", vocab_size=LARGE, n_embd=128)
    often: dict[str, Any] = {"save_every": 1, "keep_last": 9, "model": STATES[name]}
    run_ranks(run, settings(start, tmp_path / "two", tp=2, **often))
    expected = ended(tmp_path / "two")

    same = cut_off(tmp_path / "two", tmp_path / "two to two")
    run_ranks(run, settings(start, same, tp=2, resume=True, **often))
    assert ended(same) == expected
    assert equal(saved(same, 3), saved(tmp_path / "two", 3))

    # From two to one, from there to two stages of two, and back to two.
    state, out = saved(tmp_path / "two", 2), cut_off(tmp_path / "two", tmp_path / "others")
    for step, (pp, tp) in enumerate(((1, 1), (2, 2), (1, 2)), start=3):
        config = settings(start, out, pp=pp, tp=tp, resume=True, **often)
        run_ranks(take_up, config, step, world_size=pp * tp)
        assert equal(saved(out, step), state), f"{pp} stages of {tp}"

    if "lora" in STATES[name]:  # of which a checkpoint has adapters alone
        return
    newest = tmp_path / "two" / "checkpoints" / "step_00000003"
    checkpoints(["consolidate", str(newest), str(tmp_path / "c")])
    made, model = (load_file(tmp_path / name / "model.safetensors") for name in ("c", "two"))
    assert equal(made, model)


@pytest.mark.jobs
def test_the_codes_and_scales_of_a_checkpoint_are_those_of_one_process(tmp_path: Path) -> None:
    start = make(tmp_path, "gpt2", vocab_size=LARGE, n_embd=128)
    often: dict[str, Any] = {"save_every": 1, "max_steps": 1, "model": STATES["4 bits"]}
    run(settings(start, tmp_path / "one", **often))
    run_ranks(run, settings(start, tmp_path / "two", tp=2, **often))

    one, two = (
        {name: each for name, each in saved(tmp_path / out, 1).items() if "/frozen/" in name}
        for out in ("one", "two")
    )
    assert sum(name.endswith(("codes", "scales")) for name in one) == 3 * 4 * 2
    assert equal(two, one)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def overflows(config: SFTConfig) -> tuple[list[bool], list[float]]:
    """Two optimizer steps, with a gradient that is not finite in the second process's part."""
    with cut_mesh(replicas=1, tp=2, timeout_seconds=60.0) as mesh:
        rows = load_rows(config, config.model, step=1)
        with Run(config, name="step1_sft", total_steps=2, mesh=mesh) as opened:
            sft = load_model(config, rows, opened)
            up = sft.model.get_submodule("model.layers.1.mlp.up_proj").get_parameter("weight")
            skipped, norms = list[bool](), list[float]()
            for step in range(2):
                batches = cut(encode(rows.next_examples(), rows.chat, config), config)
                hook = up.register_hook(lambda found: found * torch.inf)
                if step == 1 or mesh.tensor.rank == 0:
                    hook.remove()
                sft.passes.learn(
                    batches,
                    lambda each: -sft.engine(each, uniform=True).logprobs.sum(),
                    divisor=100.0,
                )
                hook.remove()
                result = sft.engine.step()
                skipped.append(result.skipped)
                norms.append(result.grad_norm)
    return skipped, norms


def test_a_gradient_that_is_not_finite_on_one_process_skips_the_step_on_all(tmp_path: Path) -> None:
    config = settings(make(tmp_path, "llama"), tmp_path / "out", tp=2)

    (skipped, norms), other = run_ranks(overflows, config)

    assert skipped == [True, False]
    assert (skipped, norms[1]) == (other[0], other[1][1])
