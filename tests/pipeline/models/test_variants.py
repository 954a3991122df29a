"""DoRA, PiSSA and OLoRA: they begin as the base, learn as peft's own, and are saved for peft."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from inference.weights.replica import Replica
from pipeline.config import AdapterVariant, LoraConfig, TrainedModelConfig
from pipeline.config.zero import ZeroConfig
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.engine.predict import predict
from pipeline.engine.state import frozen_fragments, trained_fragments
from pipeline.errors import ConfigError
from pipeline.models.consolidate import TOKENIZER as TOKENIZER_DIRECTORY
from pipeline.models.consolidate import consolidate, describe_model
from pipeline.models.dora import Dora, row_lengths
from pipeline.models.export import export
from pipeline.models.lora import add_lora
from pipeline.models.meta import model_on_meta
from pipeline.models.principal import orthogonal_halves, singular_halves
from pipeline.models.trained import adapted, trained_causal_lm
from tests.distributed import run_ranks, world_size
from tests.families import saved, tiny_causal_lm
from tests.pipeline.models.quantized_models import (
    CPU,
    IDS,
    TOKENIZER,
    VOCAB,
    base,
    layers_of,
    learned,
    settings,
)

VARIANTS: tuple[AdapterVariant, ...] = ("dora", "pissa", "olora")
PISSA = LoraConfig(rank=4, alpha=8.0, lr=0.01, variant="pissa")
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


def of(variant: AdapterVariant) -> LoraConfig:
    return replace(PISSA, variant=variant)


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in model.named_parameters() if ".lora_" in name}


@torch.no_grad()
def logits(model: nn.Module) -> tuple[Tensor, Tensor]:
    """With the adapter, and without it."""
    model.eval()
    whole = model(input_ids=IDS).logits
    with cast("PeftModel", model).disable_adapter():
        return whole, model(input_ids=IDS).logits


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_at_the_start_the_model_is_its_base_to_the_bit_and_with_the_adapter_off_it_stays_that(
    family: str, tmp_path: Path
) -> None:
    path = base(family, tmp_path)
    cases: list[tuple[AdapterVariant, str, str]] = [
        *((variant, "fp32", "none") for variant in VARIANTS),
        ("dora", "bf16", "nf4"),
        ("pissa", "bf16", "none"),
        ("olora", "fp32", "int8"),
    ]
    for variant, precision, quantize in cases:
        ways: dict[str, Any] = {"precision": precision, "quantize": quantize}
        config = settings(path, lora=of(variant), **ways)
        plain, _ = learned(settings(path, **ways), steps=0)
        new, _ = learned(config, steps=0)

        expected = logits(plain)[1]
        assert all(torch.equal(each, expected) for each in logits(new)), (variant, ways)
        changed, off = logits(learned(config, steps=1)[0])
        assert torch.equal(off, expected), (variant, ways)
        assert (changed - expected).abs().max() > 0.05, (variant, ways)


def own_of_peft(variant: AdapterVariant, path: str) -> nn.Module:
    """What peft makes of the variant by itself."""
    changes: dict[str, Any] = {"init_lora_weights": variant}
    if variant == "dora":
        changes = {"use_dora": True}
    lora = PeftLoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **changes)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(path), lora).eval()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(input_ids=IDS).logits.square().mean().backward()
    params = adapters(model).items()
    return {name: param.grad for name, param in params if param.grad is not None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_gradients_are_those_of_pefts_own(
    variant: AdapterVariant, tmp_path: Path
) -> None:
    path = base("llama", tmp_path)
    theirs = own_of_peft(variant, path)
    ours = trained_causal_lm(settings(path, lora=of(variant)), TOKENIZER, device=CPU, seed=0).eval()
    if variant != "dora":  # both begin with a part of the same weights
        for name, param in adapters(theirs).items():
            torch.testing.assert_close(adapters(ours)[name], param, rtol=1e-4, atol=1e-5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in adapters(theirs).items():
            change = 0.1 * torch.randn(param.shape, generator=generator)
            param.add_(change)
            adapters(ours)[name].copy_(param)

    expected = theirs(input_ids=IDS).logits
    torch.testing.assert_close(ours(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    found, expected = gradients(ours), gradients(theirs)
    assert found.keys() == expected.keys()
    assert len(found) == 14 * (3 if variant == "dora" else 2)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-3, atol=1e-4, msg=name)


def test_dora_by_hand() -> None:
    layer = nn.Linear(2, 1)
    layer.weight.data, layer.bias.data = torch.tensor([[3.0, 4.0]]), torch.tensor([7.0])
    plain = PeftLoraConfig(r=1, lora_alpha=2)
    adapter = cast("Any", LoraLinear(layer, "default", config=plain, r=1, lora_alpha=2))
    adapter.lora_variant["default"] = Dora(adapter)
    magnitude = adapter.lora_magnitude_vector["default"].weight
    with torch.no_grad():
        adapter.lora_variant["default"].start(adapter, layer.weight)
    assert magnitude.tolist() == [5.0]
    adapter.lora_A["default"].weight.data = torch.tensor([[1.0, 0.0]])
    adapter.lora_B["default"].weight.data = torch.tensor([[1.0]])
    magnitude.data = torch.tensor([10.0])

    outputs = adapter(torch.tensor([[1.0, 2.0]]))  # (3 + 2, 4) has the length sqrt(41)
    outputs.sum().backward()

    root = 41.0**0.5
    torch.testing.assert_close(outputs, torch.tensor([[10 * 13 / root + 7]]))
    torch.testing.assert_close(magnitude.grad, torch.tensor([13 / root]))
    # The length is a constant: m / |W + s B A| times s A x.
    torch.testing.assert_close(
        adapter.lora_B["default"].weight.grad, torch.tensor([[10 / root * 2]])
    )


def test_lengths_of_rows_do_not_depend_on_how_many_are_computed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, up, down = torch.randn(9, 5), torch.randn(9, 2), torch.randn(2, 5)
    whole = torch.linalg.vector_norm(weight + 3 * up @ down, dim=1)

    monkeypatch.setattr("pipeline.models.dora.BLOCK", 10)

    torch.testing.assert_close(row_lengths(weight, down, up, scaling=3.0), whole)
    assert torch.equal(row_lengths(weight, down, 0 * up), row_lengths(weight))


def test_large_weights_begin_with_nearly_the_same_singular_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, right = (torch.linalg.qr(torch.randn(size, 40)).Q for size in (50, 60))
    weight = left * torch.linspace(3, 1, 40) @ right.T
    down, up = singular_halves(weight, 4)

    monkeypatch.setattr("pipeline.models.principal.EXACT", 0)
    near_down, near_up = singular_halves(weight, 4)

    torch.testing.assert_close(up.norm(dim=0).square(), torch.linspace(3, 1, 40)[:4])
    torch.testing.assert_close(near_up @ near_down, up @ down, rtol=1e-3, atol=1e-3)
    again = singular_halves(weight, 4)
    assert torch.equal(again[0], near_down)
    down, up = orthogonal_halves(weight, 4)
    torch.testing.assert_close(up.T @ up, torch.eye(4), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(up @ down, up @ up.T @ weight)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_what_is_saved_loads_in_peft_on_the_untouched_base_and_generates_the_bits_of_the_export(
    variant: AdapterVariant, tmp_path: Path
) -> None:
    config = settings(base("llama", tmp_path / "base"), lora=of(variant))
    with torch.enable_grad():
        model, engine = learned(config)
    trained, _ = logits(model)

    export(model, TOKENIZER, tmp_path / "out", weights=engine)

    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(config.path), str(tmp_path / "out" / "adapter")
    )
    torch.testing.assert_close(logits(loaded)[0], trained, rtol=1e-5, atol=1e-5)
    rank = loaded.peft_config["default"].r  # pyright: ignore[reportAttributeAccessIssue]
    assert rank == (4 if variant == "dora" else 8)
    # The model itself is as it was.
    assert model.peft_config["default"].r == 4  # pyright: ignore[reportCallIssue, reportArgumentType, reportIndexIssue]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(merged(input_ids=IDS).logits, trained, rtol=1e-4, atol=1e-4)
    replica = Replica(model, shares=True)
    replica.load(engine)
    exported = dict(merged.named_parameters())
    assert all(torch.equal(each, exported[key]) for key, each in replica.model.named_parameters())


def ends(path: str) -> dict[str, Tensor]:
    """All parameters by variant, stage and name, dequantized where they are quantized."""
    found: dict[str, Tensor] = {}
    cases: list[tuple[AdapterVariant, str]] = [
        ("dora", "nf4"),
        ("pissa", "none"),
        ("olora", "int8"),
    ]
    for variant, quantize in cases:
        for stage in (0, 3):
            zero = ZeroConfig(reduction="deterministic")
            ways: dict[str, Any] = {"lora": of(variant), "quantize": quantize, "zero": zero}
            model, engine = learned(settings(path, zero_stage=stage, **ways), steps=2)
            with engine.gathered():
                weights = adapters(model)
                weights |= {key: layer.dequantized() for key, layer in layers_of(model).items()}
                found |= {f"{variant} {stage} {key}": each.clone() for key, each in weights.items()}
    return found


@pytest.mark.jobs
def test_two_processes_have_at_every_stage_what_one_has_at_stage_0(tmp_path: Path) -> None:
    path = base("llama", tmp_path)
    alone = ends(path)

    assert any("lora_start_A" in key for key in alone)
    for got in run_ranks(ends, path):
        assert got.keys() == alone.keys()
        for key, weight in got.items():
            variant, _, name = key.split(" ")
            assert torch.equal(weight, alone[key]), key
            assert torch.equal(weight, alone[f"{variant} 0 {name}"]), key


def begun_with(path: str) -> dict[str, Tensor]:
    """How adapters begin where each process reads other weights, and each is asked for some."""
    rank_of_base = f"{path}/{int(torch.distributed.get_rank())}"
    plain = AutoModelForCausalLM.from_pretrained(rank_of_base)
    config = TrainedModelConfig(path=rank_of_base, lora=PISSA)
    return {name: each.detach() for name, each in adapters(adapted_of(plain, config)).items()}


def adapted_of(plain: Any, config: TrainedModelConfig) -> nn.Module:
    return adapted(plain, config, task="causal", seed=0)


def test_processes_begin_alike_though_they_round_differently(tmp_path: Path) -> None:
    for number in range(2):
        model = tiny_causal_lm("llama", vocab_size=VOCAB)
        for name, param in model.named_parameters():
            if "proj" in name:
                param.data *= 1 + number / 2**20
        saved(model, tmp_path / str(number))

    first, second = run_ranks(begun_with, str(tmp_path))

    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_gives_the_model_that_the_run_exports(tmp_path: Path) -> None:
    for variant in VARIANTS[:2]:
        directory = tmp_path / variant
        config = settings(base("llama", directory / "base"), lora=of(variant))
        model, engine = learned(config, steps=1)
        writer = CheckpointWriter(directory / "saved", job="test", rank=0, world_size=1)
        document = {"models": {"model": describe_model(engine.model)}}
        writer.save_base("base-test", frozen_fragments(engine, "model"))
        writer.save(1, trained_fragments(engine, "model"), document, base="base-test")
        writer.close()
        TOKENIZER.save_pretrained(directory / "saved" / TOKENIZER_DIRECTORY)
        export(model, TOKENIZER, directory / "expected", weights=engine)

        checkpoint = Checkpoint.open(directory / "saved" / "step_00000001")
        consolidate(checkpoint, "model", directory / "made")

        for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
            made, expected = (load_file(directory / each / file) for each in ("made", "expected"))
            assert made.keys() == expected.keys()
            assert all(torch.equal(made[name], expected[name]) for name in made), file


def held_and_predicted(path: str) -> list[tuple[int, int]]:
    found = []
    for variant in VARIANTS:
        for stage in (0, 3):
            config = settings(path, lora=of(variant), zero_stage=stage, precision="bf16")
            counted = model_on_meta(config, task="causal", device=CPU)
            _, engine = learned(config, steps=1)
            flats = [flat for unit in engine.zero.units for flat in unit.flats]
            held = sum((flat.shard if stage == 3 else flat.full).nbytes for flat in flats)
            found.append((held, predict(counted, config, world=world_size())["weights"]))
    return found


@pytest.mark.jobs
def test_processes_hold_the_bytes_that_the_plan_counts(tmp_path: Path) -> None:
    path = base("llama", tmp_path)

    for found in run_ranks(held_and_predicted, path):
        assert all(held == expected for held, expected in found)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"variant": "pissa", "rank": 40},  # more than q_proj has, too
            "lora.variant pissa begins as lora.rank 40 parts of each weight, and"
            " model.layers.0.self_attn.k_proj has 16; set lora.rank 16 or less",
        ),
        (
            {"variant": "dora", "targets": ("embed_tokens", "q_proj")},
            "lora.variant dora adapts linear layers, and model.embed_tokens is not a linear layer"
            " (Embedding); leave it out of lora.targets, or set lora.variant lora",
        ),
        (
            {"variant": "olora", "dropout": 0.1},
            "lora.dropout must be 0 with lora.variant olora, whose adapter is a part of the weight"
            " from the start; got 0.1",
        ),
    ],
)
def test_what_a_variant_cant_adapt_is_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        add_lora(tiny_causal_lm("llama"), LoraConfig(**changes), task="causal", seed=0)

    assert str(error.value) == sentence


def test_peft_finds_nothing_of_ours_in_a_plain_adapter() -> None:
    model = add_lora(tiny_causal_lm("llama"), LoraConfig(rank=2), task="causal", seed=0)

    layer = cast("LoraLayer", model.get_submodule(Q_PROJ))
    assert not layer.lora_variant
    assert not layer.lora_magnitude_vector
