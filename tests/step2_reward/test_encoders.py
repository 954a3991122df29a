"""Encoder backbones, whose score is computed at [CLS]."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
)

from inference.reward_model import score_responses
from pipeline.config import FrozenModelConfig, LoraConfig
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Example, Message
from pipeline.models.hf.load import load_tokenizer
from step2_reward.rows import encode_dialogue
from step2_reward.train import train
from tests.step2_reward.labeled import make_config, make_rows, write_csv

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["Human", "Assistant", "Add", "and", "Sure", "It", "is", "Go", "away", ":", ".", "!", ","]


def save_bert(directory: Path) -> Path:
    """Save a tiny masked language model with a tokenizer of words."""
    vocabulary = [*SPECIAL, *WORDS, *map(str, range(20))]
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(directory)
    settings = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    BertForMaskedLM(settings).save_pretrained(directory)
    return directory


def test_long_dialogue_keeps_its_first_token_and_its_end(tmp_path: Path) -> None:
    chat = resolve_format(load_tokenizer(FrozenModelConfig(path=str(save_bert(tmp_path)))), "auto")
    prompt, response = (Message("user", "3 + 4"),), (Message("assistant", "it is 7"),)

    ids = encode_dialogue(chat, Example(prompt), response, max_length=5).input_ids

    full = chat.encode(prompt, response).input_ids
    assert ids == [2, *full[-4:]]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, lr=0.01)])
def test_encoder_learns_classes_and_scores_match_transformers(
    tmp_path: Path, lora: LoraConfig | None
) -> None:
    data = write_csv(tmp_path / "rows.csv", make_rows("classes"))
    values = {"class_list": ("rude", "curt", "polite"), "class_values": (0.0, 1.0, 2.0)}
    config = make_config(tmp_path, data, save_bert(tmp_path / "bert"), max_steps=25, **values)
    config = replace(config, model=replace(config.model, lora=lora))

    train(config)

    result = json.loads((config.output_dir / "result.json").read_text())["eval"]
    assert result["accuracy_after"] == 1.0
    model = AutoModelForSequenceClassification.from_pretrained(config.output_dir)
    chat = resolve_format(AutoTokenizer.from_pretrained(config.output_dir), "auto")
    lines = (config.output_dir / "predictions.jsonl").read_text().splitlines()
    for line in map(json.loads, lines[:3]):
        prompt = tuple(Message(turn["role"], turn["content"]) for turn in line["prompt"])
        ids = chat.encode(prompt, (Message("assistant", line["responses"][0]),)).input_ids
        assert (ids[0], ids[-1]) == (2, 3)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        expected = logits.softmax(dim=0) @ torch.tensor(values["class_values"])
        assert line["scores"][0] == pytest.approx(expected.item(), abs=1e-5)
        (score,) = score_responses(str(config.output_dir), [(prompt, line["responses"][0])])
        assert score == pytest.approx(expected.item(), abs=1e-5)
