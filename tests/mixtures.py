"""Tiny random mixtures of experts, whose files have different tensors from the model."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
}


def tiny_mixture(family: str) -> PreTrainedModel:
    """Return a model of two layers of two experts, with random fp32 weights."""
    config = AutoConfig.for_model(
        family,
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **MIXTURES[family],
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
