"""Exports are plain Hugging Face directories, replaced whole."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from pipeline.config import FrozenModelConfig
from pipeline.models.embedded import build_tokenizer
from pipeline.models.export import export
from pipeline.models.load import load_causal_lm, load_classifier
from tests.families import FAMILIES, saved, tiny_causal_lm, tiny_classifier

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_exported_language_model_says_the_same_to_the_bit_in_plain_transformers(
    family: str, tmp_path: Path
) -> None:
    plain = tiny_causal_lm(family)
    model = load_causal_lm(FrozenModelConfig(path=saved(plain, tmp_path / "in")), device=CPU)

    export(model, build_tokenizer(), tmp_path / "out")

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert again.dtype == torch.float32


@torch.no_grad()
def test_an_exported_reward_model_says_the_same_to_the_bit_in_plain_transformers(
    tmp_path: Path,
) -> None:
    plain = tiny_classifier("llama")
    model = load_classifier(FrozenModelConfig(path=saved(plain, tmp_path / "in")), device=CPU)
    model.config.update({"score_mean": 0.25, "score_std": 2.0})

    export(model, build_tokenizer(), tmp_path / "out")

    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(again(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert (again.config.score_mean, again.config.score_std) == (0.25, 2.0)


def test_a_directory_holds_safetensors_and_json_and_nothing_pickled(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages }}"

    export(tiny_causal_lm("llama"), tokenizer, tmp_path)

    names = {path.name for path in tmp_path.rglob("*")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {Path(name).suffix for name in names} <= {".json", ".safetensors", ".jinja"}
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("two words")["input_ids"] == tokenizer("two words")["input_ids"]
    assert loaded.chat_template == "{{ messages }}"


@torch.no_grad()
def test_exporting_again_replaces_the_model_and_leaves_other_files(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    second = tiny_causal_lm("llama", seed=2)

    export(tiny_causal_lm("llama", seed=1), build_tokenizer(), tmp_path)
    export(second, build_tokenizer(), tmp_path)

    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=IDS).logits, second(input_ids=IDS).logits)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"
    assert not list(tmp_path.glob(".writing-*"))
