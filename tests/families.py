"""Tiny random models of the supported families, built by `transformers`.

Outputs of freshly initialized models are nearly uniform: a wrong mask changes log-probabilities by
less than rounding. Here weights are large, so that every visible token matters.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from pipeline.config import FrozenModelConfig
from pipeline.data.examples import Encoded
from pipeline.demo.model import build_tokenizer
from pipeline.models.hf.export import export
from pipeline.models.hf.known import KNOWN_CONFIGS
from pipeline.models.hf.load import load_classifier, load_tokenizer

TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])

VOCAB = 101
WINDOW = 4
"""Mistral's sliding window, shorter than most sequences of the tests."""

_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**_LLAMA, "num_key_value_heads": 2}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

_HUGE = {"hidden_size": 72_000, "word_embed_proj_dim": 72_000, "ffn_dim": 288_000}
HUGE = {**KNOWN_CONFIGS["facebook/opt-66b"], **_HUGE, "num_hidden_layers": 2}
"""100 billion weights in few layers, which are built sooner than those of a published model."""

RAGGED_FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {
        **{name: value for name, value in _LLAMA.items() if name != "intermediate_size"},
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
    },
    "gpt2": _GPT2,
    "gpt_neox": _LLAMA,
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": {**GROUPED, "sliding_window": WINDOW},
    "gemma": {**GROUPED, "head_dim": 8},
    "phi": _LLAMA,
}
"""Model types whose attention takes concatenated sequences, in all versions of `transformers`."""

PADDED_FAMILIES: dict[str, dict[str, Any]] = {
    "falcon": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "alibi": False,
    },
    "gptj": {**_GPT2, "rotary_dim": 4},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": WINDOW},
}
"""Model types with custom attention, which are padded instead; GPT-J's from 5.24 on is not."""

FAMILIES = {**RAGGED_FAMILIES, **PADDED_FAMILIES}

UNPACKED: dict[str, dict[str, Any]] = {
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"]},
    "gpt_oss": {
        **GROUPED,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
    },
    "llama4_text": {
        **GROUPED,
        "head_dim": 8,
        "attention_chunk_size": WINDOW,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    },
}
"""Model types with the attention interface of ragged ones that must be padded: convolutions,
attention sinks, chunked attention."""


SCALED: dict[str, dict[str, Any]] = {
    "cohere": {**GROUPED, "logit_scale": 0.25},
    "granite": {**GROUPED, "logits_scaling": 8.0},
}
"""Model types that change the logits after the output layer, as gemma2 does too."""

POPULAR: dict[str, dict[str, Any]] = {
    "qwen2": GROUPED,
    "phi3": GROUPED,
    "roberta": _LLAMA,
    "gemma3_text": {**GROUPED, "head_dim": 8, "sliding_window": WINDOW},
}
"""More model types, for tests of a few families."""


def depends_on_later_tokens(model: PreTrainedModel) -> bool:
    """Return whether the output for a token depends on a later token."""
    ids = torch.randint(4, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[1] = ids[0]
    ids[1, -2] ^= 1
    with torch.no_grad():
        first, second = model(input_ids=ids).logits[:, :-2]
    return (first - second).abs().max().item() > 1e-3


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return settings of two layers and 101 tokens; padding is the end of sequence, as in GPT-2."""
    special = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    return AutoConfig.for_model(
        family, **{**{**FAMILIES, **UNPACKED, **SCALED, **POPULAR}[family], **special, **changes}
    )


def tiny_causal_lm(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a plain language model with large random fp32 weights."""
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    return randomize(model, seed)


def tiny_classifier(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a plain classifier with one label and large random fp32 weights."""
    config = tiny_config(family, num_labels=1, **changes)
    return randomize(
        AutoModelForSequenceClassification.from_config(config, dtype=torch.float32), seed
    )


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Set large random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(param + 0.1 * noise if param.ndim == 1 else 0.25 * noise)
    return model.eval()


def recompute_activations(model: PreTrainedModel, *, reentrant: bool = False) -> None:
    """Recompute blocks in the backward pass, as transformers does."""
    # Before transformers 5.23 its name was gradient_checkpointing_enable.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})


def save_base(
    directory: Path, family: str = "llama", *, tokenizer: Any = None, **changes: Any
) -> Path:
    """Save a tiny random model with its tokenizer, by default the embedded one."""
    tokenizer = tokenizer or build_tokenizer()
    tiny_causal_lm(family, **{"vocab_size": len(tokenizer), **changes}).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_to(model: PreTrainedModel, directory: Path) -> str:
    """Save a model and return the directory."""
    model.save_pretrained(directory)
    return str(directory)


def export_reward(start: Path, directory: Path) -> None:
    """Export a reward model from a language model, with a random score head."""
    config = FrozenModelConfig(path=str(start))
    model = load_classifier(config, device=torch.device("cpu"), num_labels=1)
    export(model, load_tokenizer(config), directory)


def random_rows(lengths: tuple[int, ...], *, seed: int = 0, prompt: int = 1) -> list[Encoded]:
    """Return sequences of random tokens; those after the first `prompt` tokens are trained on."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Encoded(
            torch.randint(3, VOCAB, (length,), generator=generator).tolist(),
            [position >= prompt for position in range(length)],
        )
        for length in lengths
    ]
