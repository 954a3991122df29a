"""Small models of the families that are exported, with large weights and a tokenizer."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline.data.chat.resolve_format import resolve_format
from pipeline.demo.model import build_model, build_tokenizer
from tests.pipeline.data.tokenizers import byte_level

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "max_position_embeddings": 128},
}


def save_model(
    directory: Path,
    family: str,
    *,
    labels: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Save a language model, or with `labels` a classifier, with large random weights."""
    tokenizer = tokenizer or byte_level(bos=True)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **{} if labels is None else {"num_labels": labels},
        **(SIZES[family] | settings),
    )
    auto = AutoModelForCausalLM if labels is None else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def save_embedded(directory: Path) -> PreTrainedModel:
    """Save the embedded model with random weights, its tokenizer and a run's chat template."""
    tokenizer = build_tokenizer()
    resolve_format(tokenizer, "auto").attach(tokenizer)
    model = build_model(vocab_size=len(tokenizer), seed=0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model
