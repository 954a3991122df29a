"""Step 1 with `parallel.arithmetic invariant:4` ends in the same bits for tp 1, 2 and 4."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import LoraConfig, OptimConfig, ParallelConfig
from pipeline.config.zero import ZeroConfig
from pipeline.errors import ConfigError
from pipeline.models.divided_vocabulary import LARGE
from tests.distributed import run_ranks
from tests.step1_sft.small_runs import cut_off, ended, make, run, saved, settings

FOUR_KEYS = {"num_key_value_heads": 4}

DOUBLE = {"quantize": "nf4", "double_quant": True}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Family, its changes, and settings of the model.
    "tied, bf16, checkpointing, stage 3": (
        "llama",
        {**FOUR_KEYS, "tie_word_embeddings": True, "vocab_size": LARGE},
        {"precision": "bf16", "gradient_checkpointing": True, "zero_stage": 3},
    ),
    "norms of heads, biases": (
        "qwen3",
        {**FOUR_KEYS, "attention_bias": True, "vocab_size": LARGE},
        {"precision": "fp32"},
    ),
    "layers of a block itself, fp16": ("opt", {}, {"precision": "fp16", "zero_stage": 1}),
    "packed queries, keys and values": (
        "gpt2",
        {"vocab_size": LARGE},
        {"precision": "bf16", "zero_stage": 2},
    ),
    "attention beside the MLP": ("gpt_neox", {}, {"precision": "fp32", "zero_stage": 2}),
    "adapters of layers of a block itself": (
        "opt",
        {},
        {"precision": "bf16", "lora": LoraConfig(rank=2)},
    ),
    "adapters of packed layers": (
        "gpt2",
        {"vocab_size": LARGE},
        {"precision": "fp32", "lora": LoraConfig(rank=2), "zero_stage": 3},
    ),
    "dropout of adapters, padded in groups": (
        "bloom",
        {"n_layer": 3},
        {"precision": "fp32", "lora": LoraConfig(rank=2, dropout=0.3)},
    ),
    "dropout of layers of a block itself, recomputed": (
        "opt",
        {},
        {"gradient_checkpointing": True, "lora": LoraConfig(rank=2, dropout=0.3)},
    ),
    "lengths of packed columns, dropout": (
        "gpt2",
        {"vocab_size": LARGE},
        {"precision": "bf16", "lora": LoraConfig(rank=2, variant="dora", dropout=0.3)},
    ),
    "lengths of rows, stage 3": (
        "opt",
        {},
        {"zero_stage": 3, "lora": LoraConfig(rank=2, variant="dora")},
    ),
    "singular vectors, stage 3": (
        "llama",
        FOUR_KEYS,
        {"precision": "bf16", "zero_stage": 3, "lora": LoraConfig(rank=2, variant="pissa")},
    ),
    "orthogonal columns, packed": ("gpt2", {}, {"lora": LoraConfig(rank=2, variant="olora")}),
    "residuals in modules, padded": ("bloom", {"n_layer": 3}, {"precision": "fp32"}),
    "4 bits in groups": (
        "llama",
        {**FOUR_KEYS, "hidden_size": 256, "intermediate_size": 512},
        {"precision": "bf16", "lora": LoraConfig(rank=2), **DOUBLE, "gradient_checkpointing": True},
    ),
    "4 bits within blocks, packed layers": (
        "gpt2",
        {},
        {"lora": LoraConfig(rank=2, variant="dora", dropout=0.3), **DOUBLE, "zero_stage": 3},
    ),
    "8 bits of layers of a block itself": (
        "opt",
        {},
        {"lora": LoraConfig(rank=2, variant="pissa"), "quantize": "int8"},
    ),
}
SOME = (
    "tied, bf16, checkpointing, stage 3",
    "norms of heads, biases",
    "lengths of packed columns, dropout",
    "4 bits within blocks, packed layers",
)
"""That CI goes through; the others are the grid."""


def by_parts(start: Path, out: Path, tp: int, model: dict[str, Any], **changes: Any) -> None:
    """Train on `tp` processes, as 4 parts of each layer."""
    parallel = ParallelConfig(tp=tp, micro_batches=3, arithmetic="invariant:4")
    run_ranks(run, settings(start, out, parallel=parallel, model=model, **changes), world_size=tp)


@pytest.mark.jobs
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in SOME else pytest.mark.grid) for n in CASES]
)
def test_one_two_and_four_processes_end_in_the_same_bits(case: str, tmp_path: Path) -> None:
    family, changes, model = CASES[case]
    start = make(tmp_path, family, **changes)

    for tp in (1, 2, 4):
        by_parts(start, tmp_path / str(tp), tp, model)

    alone, *others = (ended(tmp_path / str(tp)) for tp in (1, 2, 4))
    assert len(alone["metrics"]) >= 4
    assert others == [alone, alone]
    assert alone["weights"]
    run(settings(start, tmp_path / "fast", model=model))
    assert ended(tmp_path / "fast")["weights"] != alone["weights"]


TREE = {"zero": ZeroConfig(reduction="deterministic"), "precision": "bf16"}
DORA = {"lora": LoraConfig(rank=2, variant="dora", dropout=0.3)}
MIXTURES: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
    # The division of four processes, and settings of the model.
    "two stages of two": (ParallelConfig(pp=2, tp=2, micro_batches=4), {"zero_stage": 1}),
    "two stages of two chunks, each of two": (
        ParallelConfig(pp=2, tp=2, schedule="interleaved", chunks=2, micro_batches=4),
        {"zero_stage": 1},
    ),
    "adapters on two stages of two": (
        ParallelConfig(pp=2, tp=2, micro_batches=4),
        {**DORA, "gradient_checkpointing": True},
    ),
    "two groups of two": (ParallelConfig(tp=2, micro_batches=2), {"zero_stage": 3}),
    "two replicas of two": (ParallelConfig(tp=2, micro_batches=2, replicas=2), {"zero_stage": 2}),
    "four with whole layers": (ParallelConfig(micro_batches=1), {"zero_stage": 2}),
}


@pytest.mark.jobs
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if "chunks" in n else pytest.mark.grid) for n in MIXTURES],
)
def test_four_processes_end_in_the_bits_of_one_however_they_are_divided(
    name: str, tmp_path: Path
) -> None:
    (parallel, own), shape = MIXTURES[name], {**FOUR_KEYS, "tie_word_embeddings": True}
    blocks = 2 * parallel.chunks  # of which each chunk has one
    start = make(tmp_path, "qwen3", vocab_size=LARGE, blocks=blocks, **shape)
    model, alone = {**TREE, **own}, ParallelConfig(micro_batches=4, arithmetic="invariant:4")
    plain = {**model, "zero_stage": 0}
    run(settings(start, tmp_path / "alone", parallel=alone, model=plain))

    divided = replace(parallel, arithmetic="invariant:4")
    config = settings(start, tmp_path / "four", parallel=divided, model=model)
    run_ranks(run, config, world_size=4)

    assert ended(tmp_path / "four") == ended(tmp_path / "alone")


STATES: dict[str, dict[str, Any]] = {
    "whole weights": {"precision": "bf16"},
    "lengths, dropout": DORA,
    "singular vectors": {"precision": "bf16", "lora": LoraConfig(rank=2, variant="pissa")},
    "orthogonal columns": {"lora": LoraConfig(rank=2, variant="olora"), "zero_stage": 3},
}


@pytest.mark.jobs
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "whole weights" else pytest.mark.grid) for n in STATES],
)
def test_a_state_of_any_tp_goes_on_in_any_other_to_the_bit(name: str, tmp_path: Path) -> None:
    start, model = make(tmp_path, "gpt2", vocab_size=LARGE), STATES[name]
    often: dict[str, Any] = {"save_every": 1, "keep_last": 9}
    by_parts(start, tmp_path / "two", 2, model, **often)

    for tp in (1, 4):
        out = cut_off(tmp_path / "two", tmp_path / f"two to {tp}")
        by_parts(start, out, tp, model, resume=True, **often)
        assert ended(out) == ended(tmp_path / "two")
        assert equal(saved(out, 3), saved(tmp_path / "two", 3))
    last = "singular" in name or "orthogonal" in name
    assert last == any("lora_start_A" in key for key in saved(tmp_path / "two", 3))


IN_8_BITS = {
    "whole weights": {"precision": "bf16", "zero_stage": 1},
    "adapters": {"lora": LoraConfig(rank=8), "zero_stage": 2},
}


@pytest.mark.jobs
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.grid if n == "adapters" else ()) for n in IN_8_BITS]
)
def test_moments_in_8_bits_are_those_of_one_process_and_go_on_at_any_tp(
    name: str, tmp_path: Path
) -> None:
    start = make(tmp_path, "gpt2", blocks=2, n_embd=128)  # parts of 32, as long as blocks
    often: dict[str, Any] = {"save_every": 1, "keep_last": 9}
    optim = OptimConfig(lr=0.003, schedule="constant", warmup_ratio=0.0, moments="8bit")
    model = {**IN_8_BITS[name], "optim": optim}
    for tp in (1, 2):
        by_parts(start, tmp_path / str(tp), tp, model, **often)
    expected = saved(tmp_path / "1", 3)
    assert any("/exp_avg_exponents/" in key for key in expected)
    assert equal(saved(tmp_path / "2", 3), expected)

    for source, tp in ((2, 1), (1, 4)):
        out = cut_off(tmp_path / str(source), tmp_path / f"{source} to {tp}")
        by_parts(start, out, tp, model, resume=True, **often)
        assert equal(saved(out, 3), expected), f"{source} to {tp}"


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )


def test_wrong_arithmetic_is_refused_in_a_sentence() -> None:
    for wrong, sentence in {
        "invariant": r"is fast or invariant:N, such as invariant:4, got invariant$",
        "invariant:0": r"invariant:0 must have a power of two above 1, .* take invariant:2$",
        "invariant:6": r"invariant:6 must have a power of two above 1, .* take invariant:8$",
    }.items():
        with pytest.raises(ConfigError, match=rf"parallel\.arithmetic {sentence}"):
            ParallelConfig(arithmetic=wrong)
    with pytest.raises(ConfigError, match=r"which parallel\.tp 4 doesn't divide; take invariant:4"):
        ParallelConfig(tp=4, arithmetic="invariant:2")
    with pytest.raises(
        ConfigError, match=r"which parallel\.tp 3 doesn't divide; take a tp that is"
    ):
        ParallelConfig(tp=3, arithmetic="invariant:4")
