"""Tiny settings of every causal language model that `transformers` has, made by code.

A family's own defaults with few layers and small sizes; where defaults alone make no model, the
settings below say what is missing. `CAN_NOT` says which families are no language models that a step
could load.
"""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipeline.models.small_copy import small_settings

ALL = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

LAYERS = 4
NAMES_OF_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DECODER = {"is_decoder": True}

CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "hidden_size": 32, "attn_layer_indices": [1, 3]},
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "blenderbot": {"encoder_layers": 2, "decoder_layers": 2, "num_hidden_layers": 2},
    "camembert": _DECODER,
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _PLAIN_ROPE, "sliding_attention": _PLAIN_ROPE}
    },
    "data2vec-text": _DECODER,
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "doge": {"keep_window_size": 6},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "electra": _DECODER,
    "ernie": _DECODER,
    "falcon_h1": {**_MAMBA, "hidden_size": 32, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 4},
    "granitemoehybrid": {
        **_MAMBA,
        "hidden_size": 32,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 128, "num_key_value_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"hidden_size": 32, "expand": 1, "num_heads": 4, "head_dim": 8, "n_groups": 1},
    "megatron-bert": _DECODER,
    "ministral": {"head_dim": 128},
    "mistral": {"sliding_window": 512},
    "mixtral": {"sliding_window": 512},
    "nemotron": {"num_key_value_heads": 8},
    "olmo_hybrid": _DELTA,
    "phimoe": {"sliding_window": 512},
    "qwen2": {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "recurrent_gemma": {"lru_width": 32},
    "rembert": _DECODER,
    "roberta": _DECODER,
    "roberta-prelayernorm": _DECODER,
    "roc_bert": _DECODER,
    "roformer": _DECODER,
    "starcoder2": {"sliding_window": 512},
    "xlm": {"causal": True},
    "xlm-roberta": _DECODER,
    "xlm-roberta-xl": _DECODER,
    "xmod": {**_DECODER, "default_language": "en_XX"},
}
"""What a family's defaults leave open, or have as no model that is trained to generate has it."""


def tiny_settings(family: str) -> PreTrainedConfig:
    """Defaults with four layers and small sizes; of a family with images, its language part."""
    defaults = AutoConfig.for_model(family)
    text = defaults.get_text_config(decoder=True)
    if any(value is text for value in vars(defaults).values()):
        defaults = text
    changes: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    for name in NAMES_OF_LAYERS:
        if isinstance(getattr(defaults, name, None), int):
            changes[name] = min(LAYERS, getattr(defaults, name))
    changes |= CHANGES.get(family, {}) | CHANGES.get(str(defaults.model_type), {})
    return small_settings(type(defaults)(**changes))
