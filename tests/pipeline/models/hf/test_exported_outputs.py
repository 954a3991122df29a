"""Outputs of exports in plain `transformers` are the trained ones, alone and padded."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from pipeline.config import FrozenModelConfig, LoraConfig
from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.demo.model import build_tokenizer
from pipeline.export.onnx_file import positions_from_mask
from pipeline.models.adapters.lora import add_lora
from pipeline.models.forward.forward import Policy, Scorer
from pipeline.models.hf.export import export
from pipeline.models.hf.load import load_causal_lm, load_classifier, load_tokenizer
from pipeline.models.hf.padding import NEW_TOKEN, with_padding_token
from tests.families import save_to, tiny_causal_lm, tiny_classifier

EOS = "</s>"
TEXTS = ["12 + 7?", "What is the capital of France?", "no"]
CPU = torch.device("cpu")
PAD_IS_EOS = {"pad_token": EOS}
PAD = {"pad_token": "<pad>"}
TIED = {"tie_word_embeddings": True}
ALL = "all-linear"

CASES: list[tuple[str, dict[str, Any], dict[str, str], str, tuple[str, ...]]] = [
    ("llama", TIED, {**PAD_IS_EOS, "unk_token": "<unk>"}, "<unk>", ("embed_tokens", "q_proj")),
    ("llama", TIED, {}, NEW_TOKEN, ("lm_head",)),
    ("llama", {"tie_word_embeddings": False}, PAD, "<pad>", ("lm_head", "embed_tokens")),
    ("qwen2", {}, PAD_IS_EOS, "<|endoftext|>", (ALL,)),  # biases; its tokenizer adds a token
    ("qwen3", TIED, PAD, "<pad>", ()),
    ("gemma3_text", TIED, PAD, "<pad>", ("lm_head", "q_proj")),  # scaled embeddings
    ("phi3", {"pad_token_id": 3}, {"bos_token": "<s>"}, "<s>", (ALL,)),
    ("mistral", {}, {}, NEW_TOKEN, ("embed_tokens",)),
    ("gpt2", {}, {"bos_token": "<s>"}, "<s>", ("wte", "c_attn")),  # tied, transposed weights
    ("gpt_neox", {"pad_token_id": None}, {}, NEW_TOKEN, (ALL,)),
    ("opt", {}, PAD, "<pad>", ()),  # tied; positions from the mask
]
"""Family, settings, special tokens other than EOS, padding token of the export, adapted modules."""


def tokenizer_with(**tokens: str) -> PreTrainedTokenizerFast:
    """Return the embedded tokenizer with only these special tokens."""
    backend = json.loads(build_tokenizer().backend_tokenizer.to_str()) | {"added_tokens": []}
    backend = Tokenizer.from_str(json.dumps(backend))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, **tokens)


def add_adapters(
    model: Any, targets: tuple[str, ...], task: Literal["causal", "classifier"]
) -> Any:
    """Return the model, with random adapters if there are targets."""
    if not targets:
        return model
    model = add_lora(model, LoraConfig(rank=2, targets=targets), task=task, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, param in model.named_parameters():
        if ".lora_" in name:
            param.normal_(std=0.1, generator=generator)
    return model.eval()


def compute_logprobs(logits: Tensor, rows: list[list[int]]) -> Tensor:
    """Return log-probabilities of all tokens but the first, from (B, T, V) without padding."""
    logprobs = (
        logits[row, : len(ids) - 1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])
        for row, ids in enumerate(rows)
    )
    return torch.cat(list(logprobs)).flatten()


def tokenize_texts(directory: Path, side: str, padding: str) -> dict[str, Tensor]:
    """Tokenize the texts with the tokenizer of the export."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side=side)
    assert tokenizer.pad_token == padding
    batch = tokenizer([text + EOS for text in TEXTS], add_special_tokens=False, padding=True)
    return {name: torch.tensor(batch[name]) for name in ("input_ids", "attention_mask")}


def test_padding_token_that_ends_turns_is_replaced() -> None:
    tokenizer = tokenizer_with(pad_token="<pad>", unk_token="<unk>")
    assert with_padding_token(tokenizer).pad_token == "<pad>"

    tokenizer.chat_template = "{{ messages[0].content + '<pad>' }}"

    assert with_padding_token(tokenizer).pad_token == "<unk>"


@pytest.mark.parametrize(("family", "settings", "tokens", "padding", "targets"), CASES)
@pytest.mark.parametrize("task", ["causal", "classifier"])
@torch.no_grad()
def test_outputs_of_an_export_equal_the_trained_ones(
    tmp_path: Path,
    task: Literal["causal", "classifier"],
    family: str,
    settings: dict[str, Any],
    tokens: dict[str, str],
    padding: str,
    targets: tuple[str, ...],
) -> None:
    start, out, is_lm = tmp_path / "start", tmp_path / "out", task == "causal"
    tokenizer_with(**tokens).save_pretrained(start)
    make, load = (tiny_causal_lm, load_causal_lm) if is_lm else (tiny_classifier, load_classifier)
    config = FrozenModelConfig(path=save_to(make(family, vocab_size=1280, **settings), start))
    tokenizer = load_tokenizer(config)
    targets = targets if is_lm else tuple(name for name in targets if name != "lm_head")
    model: nn.Module = add_adapters(load(config, device=CPU), targets, task)
    rows = [tokenizer(text + EOS, add_special_tokens=False)["input_ids"] for text in TEXTS]
    batch = collate([Encoded(row, [True] * len(row)) for row in rows])
    expected = Policy(model)(batch).logprobs if is_lm else Scorer(model).final_scores(batch)

    export(model, tokenizer, out)

    auto = AutoModelForCausalLM if is_lm else AutoModelForSequenceClassification
    loaded = auto.from_pretrained(out)
    separate = [loaded(input_ids=torch.tensor([row])).logits for row in rows]
    padded_outputs = []
    for side in ("left", "right"):
        padded = tokenize_texts(out, side, str(tokenizer.pad_token) if is_lm else padding)
        logits = loaded(**padded, **positions_from_mask(loaded, padded["attention_mask"])).logits
        if is_lm:
            kept = padded["attention_mask"].bool()
            logits = torch.nn.utils.rnn.pad_sequence(
                [row[mask] for row, mask in zip(logits, kept, strict=True)], batch_first=True
            )
        padded_outputs.append(compute_logprobs(logits, rows) if is_lm else logits.flatten())
    if is_lm:
        outputs = [compute_logprobs(x, [row]) for x, row in zip(separate, rows, strict=True)]
    else:
        outputs = [logits.flatten() for logits in separate]
    for actual in (*padded_outputs, torch.cat(outputs)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
