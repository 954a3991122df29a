"""Merged models and separate adapters, compared with peft; invalid input of the command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.export.command import main
from pipeline.export.source import atomic_directory
from pipeline.export.verify import UnverifiedError
from pipeline.export.weights import AdapterExport
from pipeline.models.adapters.lora import suppress_peft_warnings
from pipeline.system.errors import ConfigError, ModelError
from tests.pipeline.export.models import save_model


def run(path: Path, to: str, out: Path, *options: str) -> None:
    main(["--path", str(path), "--to", to, "--out", str(out), *options])


def save_adapter(directory: Path, **changes: Any) -> Path:
    """Save a random adapter of GPT-2, whose matrices are stored transposed."""
    model = save_model(directory / "base", "gpt2")
    targets = ["c_attn", "c_fc"]
    settings = LoraConfig(r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=True, **changes)
    peft = get_peft_model(model, settings)
    with torch.no_grad():
        for name, param in peft.named_parameters():
            if "lora_B" in name:
                param.normal_()
    peft.peft_config["default"].base_model_name_or_path = str(directory / "base")
    peft.save_pretrained(str(directory / "adapter"))
    return directory / "adapter"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_adapter(tmp_path)


def merge_with_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base)
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().state_dict()


def test_merged_adapter_matches_peft(
    tmp_path: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(adapter, "merged", tmp_path / "out")

    expected = merge_with_peft(tmp_path / "base", adapter)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(tmp_path / "base" / "model.safetensors")
    changed = [name for name in tensors if not torch.equal(tensors[name], before[name])]
    assert len(changed) == 4
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name])
    printed = capsys.readouterr().out
    assert f"{adapter}: weights with the adapter merged\nverified: logits computed by" in printed
    run(tmp_path / "base", "merged", tmp_path / "copy")
    assert f"{tmp_path}/base: weights\n" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_merging_an_adapter_of_one_tied_layer_unties_the_weights(
    target: str, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", "llama", tie_word_embeddings=True)
    with suppress_peft_warnings():
        peft = get_peft_model(base, LoraConfig(r=4, target_modules=[target])).eval()
        with torch.no_grad():
            for name, param in peft.named_parameters():
                if ".lora_" in name:
                    param.normal_(std=0.2)
        peft.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
        peft.save_pretrained(str(tmp_path / "adapter"))

    run(tmp_path / "adapter", "merged", tmp_path / "out")

    merged, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(merged(ids).logits, peft(ids).logits, rtol=0, atol=1e-5)
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


def test_exported_adapter_is_verified_against_the_merged_weights(
    tmp_path: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(adapter, "merged", tmp_path / "model")
    adapter.rename(tmp_path / "model" / "adapter")

    run(tmp_path / "model", "adapter", tmp_path / "out")

    printed = capsys.readouterr().out
    assert "logits computed by the base with the adapter are within 1e-05 of the model's" in printed
    expected = merge_with_peft(tmp_path / "base", tmp_path / "out")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name])

    tensors["transformer.h.0.mlp.c_fc.weight"][3, 3] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnverifiedError, match="computed by the base with the adapter and by"):
        AdapterExport(tmp_path / "model" / "adapter", None).verify(tmp_path / "out")


def test_adapter_of_a_different_base_raises(tmp_path: Path, adapter: Path) -> None:
    save_model(tmp_path / "other", "gpt2", n_layer=1)

    with pytest.raises(ModelError, match=r"matches nothing in .*other; the adapter is for another"):
        run(adapter, "merged", tmp_path / "out", "--base", str(tmp_path / "other"))
    save_model(tmp_path / "wider", "gpt2", n_inner=48)
    with pytest.raises(ModelError, match=r"can't be applied to .*wider: .*; pass its base with"):
        run(adapter, "merged", tmp_path / "out", "--base", str(tmp_path / "wider"))
    with pytest.raises(ModelError, match="not a local directory; pass the base's directory"):
        run(adapter, "merged", tmp_path / "out", "--base", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="base is a complete model, not an adapter; omit --base"):
        run(tmp_path / "base", "merged", tmp_path / "out", "--base", str(tmp_path / "other"))
    with pytest.raises(ModelError, match="contains an adapter; merge it with --to merged"):
        run(adapter, "onnx", tmp_path / "out")


def test_invalid_input_raises_and_creates_nothing(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    (tmp_path / "empty").mkdir()
    (tmp_path / "existing").mkdir()
    (tmp_path / "existing" / "file").touch()
    out = tmp_path / "out"

    with pytest.raises(ModelError, match=r"contains no model: it has no config.json"):
        run(tmp_path / "empty", "gguf", out)
    with pytest.raises(ModelError, match=r"no such model: .*none is not a directory"):
        run(tmp_path / "none", "onnx", out)
    with pytest.raises(ModelError, match="contains a model without an adapter"):
        run(tmp_path / "model", "adapter", out)
    with pytest.raises(ConfigError, match=r"--out .*existing already exists; remove it"):
        run(tmp_path / "model", "merged", tmp_path / "existing")
    with pytest.raises(ConfigError, match="--number-format f16 is only for --to gguf"):
        run(tmp_path / "model", "merged", out, "--number-format", "f16")
    with pytest.raises(ConfigError, match="--to is missing; pass gguf, onnx, merged or adapter"):
        main(["--path", str(tmp_path / "model"), "--out", str(out)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "existing", "model"]


def test_unverified_output_is_removed(tmp_path: Path) -> None:
    def write(*, fails: bool) -> None:
        with atomic_directory(tmp_path / "out") as partial:
            (partial / "file").write_text("content")
            assert not (tmp_path / "out").exists()
            if fails:
                raise UnverifiedError("not exported")

    with pytest.raises(UnverifiedError):
        write(fails=True)
    assert not list(tmp_path.iterdir())
    write(fails=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
