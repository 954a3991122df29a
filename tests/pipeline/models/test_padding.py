"""Exported classifiers score in plain `transformers` as they were trained, alone and in batches."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from pipeline.config import FrozenModelConfig, LoraConfig
from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.demo.model import build_tokenizer
from pipeline.models.export import export
from pipeline.models.forward import Scorer
from pipeline.models.load import load_classifier, load_tokenizer
from pipeline.models.lora import add_lora
from pipeline.models.padding import NEW_TOKEN
from tests.families import saved, tiny_classifier

END = "</s>"
TEXTS = ["12 + 7?", "What is the capital of France?", "no"]


def tokenizer_with(**tokens: str) -> PreTrainedTokenizerFast:
    """The embedded tokenizer, of whose special tokens only these are left."""
    backend = json.loads(build_tokenizer().backend_tokenizer.to_str()) | {"added_tokens": []}
    backend = Tokenizer.from_str(json.dumps(backend))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, **tokens)


@pytest.mark.parametrize(
    ("tokens", "padding", "family", "adapted"),
    [
        ({"pad_token": END, "unk_token": "<unk>", "bos_token": "<s>"}, "<unk>", "llama", False),
        ({"bos_token": "<s>"}, "<s>", "gpt2", True),
        ({"pad_token": "<pad>"}, "<pad>", "llama", False),
        ({}, NEW_TOKEN, "llama", True),
        ({}, NEW_TOKEN, "gpt2", False),
    ],
)
@torch.no_grad()
def test_scores_of_an_export_equal_the_trained_ones(
    tmp_path: Path, tokens: dict[str, str], padding: str, family: str, adapted: bool
) -> None:
    start, out = tmp_path / "start", tmp_path / "out"
    tokenizer_with(**tokens).save_pretrained(start)
    config = FrozenModelConfig(path=saved(tiny_classifier(family, vocab_size=1280), start))
    tokenizer, model = load_tokenizer(config), load_classifier(config, device=torch.device("cpu"))
    if adapted:
        model = add_lora(model, LoraConfig(rank=2), task="classifier", seed=0)
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    rows = [[*row, tokenizer.eos_token_id] for row in rows]
    expected = Scorer(model).final_scores(collate([Encoded.untrained(row) for row in rows]))

    export(model, tokenizer, out)

    again = AutoModelForSequenceClassification.from_pretrained(out)
    for side in ("left", "right"):
        exported = AutoTokenizer.from_pretrained(out, padding_side=side)
        assert exported.pad_token == padding
        batch = exported([text + END for text in TEXTS], add_special_tokens=False, padding=True)
        batch = {name: torch.tensor(batch[name]) for name in ("input_ids", "attention_mask")}
        positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        together = again(**batch, position_ids=positions).logits.flatten()
        alone = [again(input_ids=torch.tensor([row])).logits.item() for row in rows]
        assert torch.allclose(together, expected, rtol=0, atol=1e-5)
        assert torch.allclose(torch.tensor(alone), expected, rtol=0, atol=1e-5)
