"""Adapters on a base in 4 or 8 bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from pipeline.demo.model import VOCABULARY, build_tokenizer
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.state import frozen_fragments, trained_fragments
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.engine.engine import Engine
from pipeline.models.adapters.quantized import QuantizedLinear, Scheme
from pipeline.models.forward.forward import Scorer
from pipeline.models.hf.consolidate import TOKENIZER, consolidate, describe_model
from pipeline.models.hf.export import export
from pipeline.models.trained import prepare_classifier
from tests.families import save_to, tiny_classifier
from tests.pipeline.models.adapters.quantized_models import (
    BATCH,
    CPU,
    IDS,
    NF4,
    QUANTIZATIONS,
    get_layers,
    get_module,
    plain_names,
    save_base,
    settings,
    train,
)


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d"])
def test_outputs_and_gradients_match_dequantized_weights_bitwise(
    kind: str, dtype: torch.dtype, scheme: Scheme
) -> None:
    torch.manual_seed(0)
    plain = Conv1D(24, 40) if kind == "conv1d" else nn.Linear(40, 24, bias=kind == "linear")
    nn.Module.to(plain, dtype).requires_grad_(requires_grad=False)
    layer = QuantizedLinear(plain, scheme)
    plain.weight.copy_(layer.weight)
    grad = torch.randn(2, 3, 24, dtype=dtype)

    actual, expected = [], []
    for module, out in ((layer, actual), (plain, expected)):
        x = torch.linspace(-1, 1, 240, dtype=dtype).view(2, 3, 40).requires_grad_()
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # noqa: B023
            y = module(x)
        y.backward(grad)
        assert x.grad is not None
        out += [y, x.grad]
        assert module is plain or not saved, "a weight was saved for the backward pass"

    assert (layer.in_features, layer.out_features) == (40, 24)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@torch.no_grad()
def test_export_adds_adapters_to_the_dequantized_base_in_fp32(
    precision: str, quantization: dict[str, Any], tmp_path: Path
) -> None:
    config = settings(save_base("llama", tmp_path / "base"), precision=precision, **quantization)
    with torch.enable_grad():
        model, engine = train(config)
    export(model, build_tokenizer(), tmp_path / "out", weights=engine)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")

    assert not any("codes" in name or "scale" in name for name in merged.state_dict())
    for name, layer in get_layers(model).items():
        name = name.removesuffix(".base_layer")  # noqa: PLW2901
        adapter = get_module(model, name)
        a, b = adapter.lora_A["default"].weight, adapter.lora_B["default"].weight
        expected = (layer.dequantize() + 2.0 * (b @ a)).to(layer.dtype)
        assert b.abs().max() > 0
        assert torch.equal(merged.get_submodule(name).get_parameter("weight"), expected)
    # Adapters in peft's format load on the original model, which isn't quantized.
    original = AutoModelForCausalLM.from_pretrained(str(config.path), dtype="auto")
    loaded = PeftModel.from_pretrained(original, str(tmp_path / "out" / "adapter"))
    logits = model.eval()(input_ids=IDS).logits
    assert not torch.equal(loaded(input_ids=IDS).logits, logits)
    if precision == "fp32":  # merged weights are rounded, which shows in bf16
        torch.testing.assert_close(merged(input_ids=IDS).logits, logits, rtol=1e-4, atol=1e-4)


def test_checkpoint_has_codes_and_consolidates_to_the_export(tmp_path: Path) -> None:
    config = settings(save_base("llama", tmp_path / "base"), precision="bf16", **NF4)
    model, engine = train(config)
    writer = CheckpointWriter(tmp_path / "saved", job="test", rank=0, world_size=1)
    document = {"models": {"model": describe_model(engine.model)}}
    writer.save_base("base-test", frozen_fragments(engine, "model"))
    writer.save(1, trained_fragments(engine, "model"), document, base="base-test")
    writer.wait()
    build_tokenizer().save_pretrained(tmp_path / "saved" / TOKENIZER)
    export(model, build_tokenizer(), tmp_path / "expected", weights=engine)
    checkpoint = Checkpoint.open(tmp_path / "saved" / "step_00000001")

    keys = set(checkpoint.keys())
    codes = {key for key in keys if key.endswith("codes")}
    consolidate(checkpoint, "model", tmp_path / "consolidated")

    assert len(codes) == 14
    assert all(checkpoint.dtype(key) == torch.uint8 for key in codes)
    assert keys.isdisjoint({key.replace("codes", "weight") for key in codes})
    weights = "model.safetensors"
    assert (tmp_path / "consolidated" / weights).read_bytes() == (
        tmp_path / "expected" / weights
    ).read_bytes()


def test_head_of_a_quantized_reward_model_is_trained_unquantized(tmp_path: Path) -> None:
    path = save_to(tiny_classifier("llama", vocab_size=VOCABULARY), tmp_path / "base")
    config = settings(path, **NF4)
    model = prepare_classifier(config, build_tokenizer(), device=CPU, seed=0)
    engine = Engine(Scorer(model), config, total_steps=1)
    before = get_module(model, "score").modules_to_save.default.weight.clone()
    engine.backward(engine(BATCH).square().mean())
    engine.step()
    export(model, build_tokenizer(), tmp_path / "out", weights=engine)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")

    assert plain_names(model)
    assert not any("score" in name for name in get_layers(model))
    assert not torch.equal(loaded.score.weight, before)
    torch.testing.assert_close(
        loaded(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits, rtol=1e-4, atol=1e-4
    )
