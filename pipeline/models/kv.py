"""Keys and values: their size, and the cache that a model takes."""

import inspect
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from pipeline.models.forward import base_model


def cache_name(model: nn.Module) -> Literal["cache", "past_key_values"]:
    """What a model's forward pass, and its result, call the cache.

    Before transformers 5.24 it was past_key_values in all families.
    """
    names = inspect.signature(base_model(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def num_key_heads(model: PreTrainedModel) -> int:
    """Heads of keys in each layer of the whole model."""
    settings = model.config.get_text_config()
    return getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads


def kv_bytes_per_token(model: PreTrainedModel, *, key_heads: int) -> int:
    """Memory of one token's keys and values in all layers, of a process with that many heads."""
    settings = model.config.get_text_config()
    head_size = getattr(settings, "head_dim", None)
    head_size = head_size or settings.hidden_size // settings.num_attention_heads
    return 2 * settings.num_hidden_layers * key_heads * head_size * model.dtype.itemsize
