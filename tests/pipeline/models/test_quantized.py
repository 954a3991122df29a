"""Adapters on a base in 4 or 8 bits: it is frozen, small, and the same wherever it is used."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from pipeline.config import (
    FrozenModelConfig,
    TrainedModelConfig,
)
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.engine.engine import Engine
from pipeline.engine.frozen import FrozenEngine
from pipeline.engine.state import frozen_fragments, trained_fragments
from pipeline.errors import ConfigError
from pipeline.models.block_codes import Form
from pipeline.models.consolidate import TOKENIZER as TOKENIZER_DIRECTORY
from pipeline.models.consolidate import consolidate, describe_model
from pipeline.models.export import export
from pipeline.models.forward import Policy, Scorer
from pipeline.models.load import load_causal_lm, load_classifier
from pipeline.models.meta import model_on_meta
from pipeline.models.quantized import QuantizedLinear
from pipeline.models.trained import frozen_bytes, trained_causal_lm, trained_classifier
from tests.distributed import run_ranks
from tests.families import saved, tiny_classifier
from tests.pipeline.models.quantized_models import (
    BATCH,
    CPU,
    IDS,
    NF4,
    TOKENIZER,
    VOCAB,
    WAYS,
    base,
    layers_of,
    learned,
    module_of,
    plain_names,
    settings,
)


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
