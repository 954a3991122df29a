"""Adapters on a base in 4 or 8 bits: it is frozen, small, and the same wherever it is used."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from inference.generation import generate
from inference.weights.hash import weights_hash
from inference.weights.replica import Replica
from pipeline.config import (
    FrozenModelConfig,
    LoraConfig,
    OptimConfig,
    Precision,
    Quantize,
    TrainedModelConfig,
)
from pipeline.config.zero import OffloadConfig, ZeroConfig
from pipeline.data.batches import collate
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.engine.engine import Engine
from pipeline.engine.frozen import FrozenEngine
from pipeline.engine.predict import predict
from pipeline.engine.state import frozen_fragments, trained_fragments
from pipeline.engine.stored import StoredParameter
from pipeline.errors import ConfigError
from pipeline.models.block_codes import Form
from pipeline.models.consolidate import TOKENIZER as TOKENIZER_DIRECTORY
from pipeline.models.consolidate import consolidate, describe_model
from pipeline.models.embedded import build_tokenizer
from pipeline.models.export import export
from pipeline.models.forward import Policy, Scorer, base_model
from pipeline.models.load import load_causal_lm, load_classifier
from pipeline.models.lora import add_lora
from pipeline.models.meta import model_on_meta
from pipeline.models.quantized import QuantizedLinear, quantize_layers
from pipeline.models.trained import frozen_bytes, trained_causal_lm, trained_classifier
from tests.distributed import rank, run_ranks, world_size
from tests.families import random_rows, saved, tiny_causal_lm, tiny_classifier

CPU = torch.device("cpu")
TOKENIZER = build_tokenizer()
VOCAB = len(TOKENIZER)
BATCH = collate(random_rows((9, 4, 7)))
MICRO_BATCHES = (BATCH, collate(random_rows((3, 8))))
IDS = torch.tensor([[5, 6, 7, 8, 9]])
NF4: dict[str, Any] = {"quantize": "nf4"}
WAYS: list[dict[str, Any]] = [NF4, {**NF4, "double_quant": True}, {"quantize": "int8"}]


def settings(path: str, **changes: Any) -> TrainedModelConfig:
    optim = OptimConfig(lr=0.02, schedule="constant", warmup_ratio=0.0, weight_decay=0.1)
    lora = LoraConfig(rank=4, alpha=8.0, lr=0.02)
    return TrainedModelConfig(path=path, **{"optim": optim, "lora": lora, **changes})


def base(family: str, directory: Path, **changes: Any) -> str:
    return saved(tiny_causal_lm(family, vocab_size=VOCAB, **changes), directory)


def learned(config: TrainedModelConfig, *, steps: int = 3) -> tuple[nn.Module, Engine]:
    """A model, after a few steps of two micro-batches that the processes share."""
    model = trained_causal_lm(config, TOKENIZER, device=CPU, seed=0)
    engine = Engine(Policy(model), config, total_steps=steps)
    for _ in range(steps):
        for batch in MICRO_BATCHES[rank() :: world_size()]:
            engine.backward(engine(batch).logprobs.square().mean())
        engine.step()
    return model, engine


def module_of(model: nn.Module, name: str) -> Any:
    return base_model(model).get_submodule(name)


def layers_of(model: nn.Module) -> dict[str, QuantizedLinear]:
    named = base_model(model).named_modules()
    return {name: each for name, each in named if isinstance(each, QuantizedLinear)}


def plain_names(model: nn.Module) -> set[str]:
    return {name.removesuffix(".base_layer") for name in layers_of(model)}


@pytest.mark.parametrize("form", [Form("nf4"), Form("nf4", double=True), Form("int8")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d"])
def test_a_product_and_its_gradient_are_those_of_the_dequantized_weight_to_the_bit(
    kind: str, dtype: torch.dtype, form: Form
) -> None:
    torch.manual_seed(0)
    plain = Conv1D(24, 40) if kind == "conv1d" else nn.Linear(40, 24, bias=kind == "linear")
    nn.Module.to(plain, dtype).requires_grad_(requires_grad=False)
    layer = QuantizedLinear(plain, form)
    plain.weight.copy_(layer.weight)
    grad = torch.randn(2, 3, 24, dtype=dtype)

    got, expected = [], []
    for module, out in ((layer, got), (plain, expected)):
        x = torch.linspace(-1, 1, 240, dtype=dtype).view(2, 3, 40).requires_grad_()
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # noqa: B023
            y = module(x)
        y.backward(grad)
        assert x.grad is not None
        out += [y, x.grad]
        assert module is plain or not kept, "a weight was kept for the backward pass"

    assert (layer.in_features, layer.out_features) == (40, 24)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_the_linear_weights_of_the_blocks_are_quantized_and_nothing_else(
    family: str, tmp_path: Path
) -> None:
    path = base(family, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(path)
    model = trained_causal_lm(settings(path, **NF4), TOKENIZER, device=CPU, seed=0)

    in_blocks = {
        name
        for name, module in plain.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and re.search(r"\.\d+\.", name)
    }
    assert len(in_blocks) >= 8
    assert plain_names(model) == in_blocks
    learn = {name for name, param in model.named_parameters() if param.requires_grad}
    assert learn
    assert all(".lora_" in name for name in learn)


def test_layers_without_an_adapter_are_quantized_as_well(tmp_path: Path) -> None:
    config = settings(base("llama", tmp_path), lora=LoraConfig(targets=("q_proj",)), **NF4)
    model = trained_causal_lm(config, TOKENIZER, device=CPU, seed=0)

    assert len(plain_names(model)) == 14
    assert sum(name.endswith(".base_layer") for name in layers_of(model)) == 2


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_an_adapter_that_is_off_or_new_leaves_the_quantized_base(
    way: dict[str, Any], tmp_path: Path
) -> None:
    config = settings(base("llama", tmp_path / "base"), **way)
    model = trained_causal_lm(config, TOKENIZER, device=CPU, seed=0).eval()
    with torch.enable_grad():
        Engine(Policy(model), config, total_steps=1)  # has the weights come from their files
    dequantized = load_causal_lm(FrozenModelConfig(path=config.path), device=CPU)
    for name, layer in layers_of(model).items():
        plain = dequantized.get_submodule(name.removesuffix(".base_layer"))
        weight = plain.get_parameter("weight")
        assert not torch.equal(weight, layer.weight)
        weight.copy_(layer.weight)

    expected = Policy(dequantized)(BATCH).logprobs
    assert torch.equal(Policy(model)(BATCH).logprobs, expected)
    assert isinstance(model, PeftModel)
    with model.disable_adapter():
        assert torch.equal(Policy(model)(BATCH).logprobs, expected)
    export(model, TOKENIZER, tmp_path / "out")
    loaded = load_causal_lm(FrozenModelConfig(path=str(tmp_path / "out")), device=CPU)
    assert torch.equal(Policy(loaded)(BATCH).logprobs, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@torch.no_grad()
def test_the_export_is_the_dequantized_base_and_the_adapter_added_in_fp32_and_rounded_once(
    precision: str, way: dict[str, Any], tmp_path: Path
) -> None:
    config = settings(base("llama", tmp_path / "base"), precision=precision, **way)
    with torch.enable_grad():
        model, engine = learned(config)
    export(model, TOKENIZER, tmp_path / "out", weights=engine)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")

    assert not any("codes" in name or "scale" in name for name in merged.state_dict())
    for name, layer in layers_of(model).items():
        name = name.removesuffix(".base_layer")  # noqa: PLW2901
        adapter = module_of(model, name)
        a, b = adapter.lora_A["default"].weight, adapter.lora_B["default"].weight
        expected = (layer.dequantized() + 2.0 * (b @ a)).to(layer.dtype)
        assert b.abs().max() > 0
        assert torch.equal(merged.get_submodule(name).get_parameter("weight"), expected)
    # Adapters in peft's form fit the directory that training began with, which is another model.
    original = AutoModelForCausalLM.from_pretrained(str(config.path), dtype="auto")
    loaded = PeftModel.from_pretrained(original, str(tmp_path / "out" / "adapter"))
    logits = model.eval()(input_ids=IDS).logits
    assert not torch.equal(loaded(input_ids=IDS).logits, logits)
    if precision == "fp32":  # merged weights are rounded, which shows in bf16
        torch.testing.assert_close(merged(input_ids=IDS).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_what_generates_has_the_bits_of_the_export(way: dict[str, Any], tmp_path: Path) -> None:
    config = settings(base("llama", tmp_path / "base"), precision="bf16", **way)
    with torch.enable_grad():
        model, engine = learned(config)
    replica = Replica(model, shares=True)
    replica.load(engine)
    export(model, TOKENIZER, tmp_path / "out", weights=engine)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")

    exported = dict(loaded.named_parameters())
    for name, weight in replica.model.named_parameters():
        assert torch.equal(weight, exported[name]), name
    assert replica.weights_hash() == weights_hash(loaded)


def ends(path: str) -> dict[str, Tensor]:
    """The adapters, and what is dequantized, by way, stage and name."""
    found: dict[str, Tensor] = {}
    for (number, way), stage in product(enumerate(WAYS), (0, 3)):
        deterministic = ZeroConfig(reduction="deterministic")
        model, engine = learned(
            settings(path, zero_stage=stage, zero=deterministic, **way), steps=2
        )
        with engine.gathered():
            weights = {key: param for key, param in model.named_parameters() if "lora_" in key}
            weights |= {key: layer.dequantized() for key, layer in layers_of(model).items()}
            found |= {f"{number} {stage} {key}": each.clone() for key, each in weights.items()}
    return found


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.grid)])
def test_two_processes_have_at_every_stage_what_one_has_at_stage_0(
    family: str, tmp_path: Path
) -> None:
    path = base(family, tmp_path)
    alone = ends(path)

    for got in run_ranks(ends, path):
        assert got.keys() == alone.keys()
        for key, weight in got.items():
            way, _, name = key.split(" ")
            assert torch.equal(weight, alone[key]), key
            assert torch.equal(weight, alone[f"{way} 0 {name}"]), key


def differing(path: str, disk: Path) -> list[str]:
    """Ways to keep and move weights by which other ones come out."""
    nvme = OffloadConfig(params="nvme", optimizer="nvme", nvme_path=disk)
    ways = {
        "shared memory": ZeroConfig(),
        "gloo": ZeroConfig(shared_memory=False),
        "a disk": ZeroConfig(offload=nvme),
        "main memory": ZeroConfig(offload=OffloadConfig(params="cpu", optimizer="cpu")),
    }
    found: dict[str, dict[str, Tensor]] = {}
    for name, zero in ways.items():
        model, engine = learned(settings(path, zero_stage=3, zero=zero, **WAYS[1]), steps=1)
        with engine.gathered():
            found[name] = {key: param.clone() for key, param in model.named_parameters()}
    first = found["shared memory"]
    return [
        f"{name}: {key}"
        for name, weights in found.items()
        for key, weight in weights.items()
        if not torch.equal(weight, first[key])
    ]


def test_transport_and_offload_change_no_code_and_no_adapter(tmp_path: Path) -> None:
    assert run_ranks(differing, base("llama", tmp_path / "base"), tmp_path) == [[], []]


def test_at_stage_3_a_weight_is_not_read_before_the_engine_asks_for_a_piece(
    tmp_path: Path,
) -> None:
    config = settings(base("llama", tmp_path), zero_stage=3, **NF4)
    model = trained_causal_lm(config, TOKENIZER, device=CPU, seed=0)

    params = [each for each in model.parameters() if not each.requires_grad]
    assert all(isinstance(each, StoredParameter) for each in params)


def held_and_predicted(path: str) -> list[tuple[int, int]]:
    found = []
    for way, stage in product(WAYS, (0, 3)):
        config = settings(path, zero_stage=stage, precision="bf16", **way)
        counted = model_on_meta(config, task="causal", device=CPU)
        _, engine = learned(config, steps=1)
        flats = [flat for unit in engine.zero.units for flat in unit.flats]
        held = sum((flat.shard if stage == 3 else flat.full).nbytes for flat in flats)
        found.append((held, predict(counted, config, world=world_size())["weights"]))
    return found


def test_processes_hold_the_bytes_that_the_plan_counts(tmp_path: Path) -> None:
    path = base("llama", tmp_path)

    for found in run_ranks(held_and_predicted, path):
        assert all(held == expected for held, expected in found)


@pytest.mark.parametrize(
    ("quantize", "double", "most"),
    [("nf4", False, 0.35), ("nf4", True, 0.33), ("int8", False, 0.6)],
)
def test_what_a_model_of_a_usual_size_keeps_frozen(
    quantize: Quantize, double: bool, most: float
) -> None:
    plain = settings("facebook/opt-1.3b", precision="bf16")
    small = replace(plain, quantize=quantize, double_quant=double)
    sizes = [
        frozen_bytes(model_on_meta(each, task="causal", device=CPU)) for each in (plain, small)
    ]

    assert sizes[0] == 2 * 1_315_758_080
    assert sizes[1] <= most * sizes[0]


def test_a_checkpoint_holds_the_codes_and_gives_the_model_that_the_run_exports(
    tmp_path: Path,
) -> None:
    config = settings(base("llama", tmp_path / "base"), precision="bf16", **NF4)
    model, engine = learned(config)
    writer = CheckpointWriter(tmp_path / "saved", job="test", rank=0, world_size=1)
    document = {"models": {"model": describe_model(engine.model)}}
    writer.save_base("base-test", frozen_fragments(engine, "model"))
    writer.save(1, trained_fragments(engine, "model"), document, base="base-test")
    writer.close()
    TOKENIZER.save_pretrained(tmp_path / "saved" / TOKENIZER_DIRECTORY)
    export(model, TOKENIZER, tmp_path / "expected", weights=engine)
    checkpoint = Checkpoint.open(tmp_path / "saved" / "step_00000001")

    keys = set(checkpoint.keys())
    codes = {key for key in keys if key.endswith("codes")}
    consolidate(checkpoint, "model", tmp_path / "made")

    assert len(codes) == 14
    assert all(checkpoint.dtype(key) == torch.uint8 for key in codes)
    assert keys.isdisjoint({key.replace("codes", "weight") for key in codes})
    weights = "model.safetensors"
    assert (tmp_path / "made" / weights).read_bytes() == (
        tmp_path / "expected" / weights
    ).read_bytes()


def test_a_reward_model_learns_its_head_whole_over_a_quantized_base(tmp_path: Path) -> None:
    path = saved(tiny_classifier("llama", vocab_size=VOCAB), tmp_path / "base")
    config = settings(path, **NF4)
    model = trained_classifier(config, TOKENIZER, device=CPU, seed=0)
    engine = Engine(Scorer(model), config, total_steps=1)
    before = module_of(model, "score").modules_to_save.default.weight.clone()
    engine.backward(engine(BATCH).square().mean())
    engine.step()
    export(model, TOKENIZER, tmp_path / "out", weights=engine)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")

    assert plain_names(model)
    assert not any("score" in name for name in layers_of(model))
    assert not torch.equal(loaded.score.weight, before)
    torch.testing.assert_close(
        loaded(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits, rtol=1e-4, atol=1e-4
    )


def scores(path: str, way: dict[str, Any]) -> list[Tensor]:
    """What a frozen reward model says, whole and in shards."""
    found = []
    for stage in (0, 3):
        config = FrozenModelConfig(path=path, **way)
        model = load_classifier(config, device=CPU, defer=stage == 3)
        assert len(plain_names(model)) == 14
        counted = model_on_meta(config, task="classifier", device=CPU)
        assert frozen_bytes(counted) == frozen_bytes(model)
        engine = FrozenEngine(Scorer(model), TrainedModelConfig(zero_stage=stage))
        with torch.no_grad():
            found.append(engine(BATCH))
    return found


def test_a_frozen_reward_model_is_quantized_whole_and_in_shards_alike(tmp_path: Path) -> None:
    path = saved(tiny_classifier("llama", vocab_size=VOCAB), tmp_path)
    plain = load_classifier(FrozenModelConfig(path=path), device=CPU)
    small = load_classifier(FrozenModelConfig(path=path, **NF4), device=CPU)
    for name, layer in layers_of(small).items():
        plain.get_submodule(name).get_parameter("weight").data.copy_(layer.weight)
    with torch.no_grad():
        expected = Scorer(plain)(BATCH)

    for got in run_ranks(scores, path, NF4):
        assert all(torch.equal(each, expected) for each in got)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_frozen_model_generates_what_its_dequantized_copy_does(
    precision: Precision, tmp_path: Path
) -> None:
    path = base("llama", tmp_path)
    small, plain = (
        load_causal_lm(FrozenModelConfig(path=path, precision=precision, **way), device=CPU)
        for way in (NF4, {})
    )
    for name, layer in layers_of(small).items():
        plain.get_submodule(name).get_parameter("weight").data.copy_(layer.weight)

    one, other = (
        generate(
            model,
            [[5, 6, 7], [8, 9]],
            max_new_tokens=12,
            temperature=1.0,
            stop_ids=[2],
            seed=1,
            keys=[0, 1],
        )
        for model in (small, plain)
    )
    assert [each.ids for each in one] == [each.ids for each in other]


def test_recomputation_and_a_tied_weight_change_nothing(tmp_path: Path) -> None:
    path = base("gpt2", tmp_path, tie_word_embeddings=True)
    plain, _ = learned(settings(path, **NF4))
    recomputing, _ = learned(settings(path, gradient_checkpointing=True, **NF4))

    for one, other in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_weight_that_two_layers_share_stays_as_it_is() -> None:
    model = tiny_causal_lm("llama")
    shared = module_of(model, "model.layers.0.self_attn")
    shared.k_proj.weight = shared.v_proj.weight
    add_lora(model, LoraConfig(targets=("q_proj",)), task="causal", seed=0)

    assert quantize_layers(model, Form("nf4")) == 12


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora": None, **NF4}, r"quantize nf4 .* nothing to train: add adapters with lora.rank"),
        ({"lora": None, "quantize": "int8"}, r"quantize int8 .* set quantize none"),
        ({"double_quant": True}, r"double_quant belongs to quantize nf4, not none"),
        ({"double_quant": True, "quantize": "int8"}, r"double_quant .* not int8; leave it out"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        settings("any", **changes)


def test_a_model_without_linear_layers_in_its_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(base("llama", tmp_path), lora=LoraConfig(targets=("lm_head",)), **NF4)
    monkeypatch.setattr("pipeline.models.quantized.find_units", lambda _: [])

    with pytest.raises(ConfigError, match=r"quantize nf4: the blocks of .* no linear layer"):
        trained_causal_lm(config, TOKENIZER, device=CPU, seed=0)
