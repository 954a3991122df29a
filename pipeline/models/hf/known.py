"""Shapes of the models in the presets, for planning before a download.

They are from the authors' config.json files; a local directory with that name takes precedence.
"""

from collections.abc import Mapping
from typing import Any


def _opt(hidden: int, layers: int, heads: int, **changes: object) -> dict[str, Any]:
    """Return settings from Zhang et al. 2022, table 1."""
    sizes = {
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }
    return {"model_type": "opt", **sizes, **changes}


def _llama(hidden: int, inner: int, layers: int, heads: int, **changes: object) -> dict[str, Any]:
    """Return settings of Llama (Touvron et al. 2023, Grattafiori et al. 2024) or a relative."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
    return {"model_type": "llama", **sizes, **changes}


def _gpt2(hidden: int, layers: int, heads: int, **changes: object) -> dict[str, Any]:
    """Return settings of GPT-2 (Radford et al. 2019, table 2) or a relative."""
    return {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, **changes}


_LLAMA_2 = {"vocab_size": 32000, "max_position_embeddings": 4096}
_QWEN_3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
_TIED = {"tie_word_embeddings": True}
_SMOLLM_2 = {"vocab_size": 49152, "max_position_embeddings": 8192, **_TIED}
_GEMMA_3 = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "num_key_value_heads": 1,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    **_TIED,
}
_SMOLLM_3 = {"model_type": "smollm3", "max_position_embeddings": 65536, **_TIED}
_OLMO_3 = {"model_type": "olmo3", "vocab_size": 100278, "max_position_embeddings": 65536}
_PHI_4 = {"model_type": "phi3", "vocab_size": 200064, **_TIED}

KNOWN_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "facebook/opt-125m": _opt(768, 12, 12),
    "facebook/opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "facebook/opt-1.3b": _opt(2048, 24, 32),
    "facebook/opt-2.7b": _opt(2560, 32, 32),
    "facebook/opt-6.7b": _opt(4096, 32, 32),
    "facebook/opt-13b": _opt(5120, 40, 40),
    "facebook/opt-30b": _opt(7168, 48, 56),
    "facebook/opt-66b": _opt(9216, 64, 72),
    "meta-llama/Llama-2-7b-hf": _llama(4096, 11008, 32, 32, num_key_value_heads=32, **_LLAMA_2),
    "meta-llama/Llama-2-13b-hf": _llama(5120, 13824, 40, 40, num_key_value_heads=40, **_LLAMA_2),
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, **_TIED),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, **_TIED),
    "meta-llama/Llama-3.1-8B": _llama(4096, 14336, 32, 32),
    "meta-llama/Llama-3.1-70B": _llama(8192, 28672, 80, 64),
    "Qwen/Qwen3-0.6B-Base": _llama(1024, 3072, 28, 16, **_QWEN_3, **_TIED),
    "Qwen/Qwen3-1.7B-Base": _llama(2048, 6144, 28, 16, **_QWEN_3, **_TIED),
    "Qwen/Qwen3-4B-Base": _llama(2560, 9728, 36, 32, **_QWEN_3, **_TIED),
    "Qwen/Qwen3-8B-Base": _llama(4096, 12288, 36, 32, **_QWEN_3),
    "Qwen/Qwen3-14B-Base": _llama(5120, 17408, 40, 40, **_QWEN_3),
    "Qwen/Qwen3-32B": _llama(5120, 25600, 64, 64, **_QWEN_3),
    "google/gemma-3-1b-pt": _llama(1152, 6912, 26, 4, **_GEMMA_3),
    "HuggingFaceTB/SmolLM2-135M": _llama(576, 1536, 30, 9, num_key_value_heads=3, **_SMOLLM_2),
    "HuggingFaceTB/SmolLM2-1.7B": _llama(2048, 8192, 24, 32, num_key_value_heads=32, **_SMOLLM_2),
    "HuggingFaceTB/SmolLM3-3B-Base": _llama(
        2048, 11008, 36, 16, num_key_value_heads=4, **_SMOLLM_3
    ),
    "allenai/Olmo-3-1025-7B": _llama(4096, 11008, 32, 32, num_key_value_heads=32, **_OLMO_3),
    "microsoft/Phi-4-mini-instruct": _llama(3072, 8192, 32, 24, **_PHI_4),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "bigscience/bloom-1b1": {
        "model_type": "bloom",
        "hidden_size": 1536,
        "n_layer": 24,
        "n_head": 16,
        "vocab_size": 250880,
    },
    "ai-forever/mGPT": _gpt2(2048, 24, 16, vocab_size=100000, n_positions=2048),
}
"""Settings by Hub name, with the model's type; omitted ones are the type's defaults."""
