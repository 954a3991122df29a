"""A small copy of a model: its class, its layers and what they do, with few and random weights.

What a family's code does with a batch hangs on its settings, not on its weights or widths. A copy
of a few hundred kilobytes shows it in milliseconds, for a model of any size, before any weight is
read, in fp32 whatever the model's own number format is.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

HEADS = 4
HEAD_SIZE = 8
WIDTH = HEADS * HEAD_SIZE
INNER = 48
VOCABULARY = 64
WINDOW = 4
"""Tokens of every sliding window and chunk of the copy, so that a dozen tokens are beyond it."""

_WIDTHS = dict.fromkeys(
    (
        "hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size",
        "hidden_dim", "d_embed", "hidden_size_per_layer_input",
    ),
    WIDTH,
)  # fmt: skip
_INNER = dict.fromkeys(
    (
        "intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "inner_dim",
        "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
        "intermediate_size_mlp", "shared_intermediate_size", "ffn_intermediate_size",
        "decoder_ffn_dim", "encoder_ffn_dim",
        "dense_intermediate_size", "prefix_dense_intermediate_size",
    ),
    INNER,
)  # fmt: skip
_HEADS = dict.fromkeys(
    (
        "num_attention_heads",
        "n_head",
        "num_heads",
        "n_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
    ),
    HEADS,
)
_HEAD_SIZES = dict.fromkeys(
    (
        "head_dim", "d_kv", "kv_channels", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "global_head_dim", "attention_head_dim", "swa_head_dim", "swa_v_head_dim",
    ),
    HEAD_SIZE,
)  # fmt: skip
_RANKS = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), HEAD_SIZE)
_EXPERTS = dict.fromkeys(
    (
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_expert",
    ),
    4,
)  # fmt: skip
_CHOSEN = dict.fromkeys(
    (
        "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts",
        "moe_topk", "num_experts_per_topk",
    ),
    2,
)  # fmt: skip
_GROUPS = dict.fromkeys(("n_group", "topk_group", "num_expert_groups"), 1)
_TOKENS = dict.fromkeys(
    ("vocab_size", "vocab_size_per_layer_input", "tokenizer_vocab_size"), VOCABULARY
)
SIZES: dict[str, int] = {
    **_WIDTHS, **_INNER, **_HEADS, **_HEAD_SIZES, **_RANKS, **_TOKENS, "rotary_dim": HEAD_SIZE,
    "qk_head_dim": 2 * HEAD_SIZE,
}  # fmt: skip
"""Settings by name, as they are in a copy; what a model lacks stays away."""

AT_MOST: dict[str, int] = {**_EXPERTS, **_CHOSEN, **_GROUPS}
"""Settings by name likewise, but no larger in a copy than in the model."""

WINDOWS = (
    "sliding_window", "sliding_window_size", "attention_chunk_size", "window_size",
    "local_attention", "attention_window_size", "swa_window",
)  # fmt: skip

KEY_HEADS = (
    "num_key_value_heads", "kv_n_heads", "num_kv_heads", "n_head_kv", "swa_num_key_value_heads",
    "num_global_key_value_heads",
)  # fmt: skip

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id")


def small_settings(settings: PreTrainedConfig, *, heads: int = HEADS) -> PreTrainedConfig:
    """The settings with other sizes: as many layers, each of its kind, few of everything else.

    Heads that share keys still do, some experts of several are still chosen, and windows are
    `WINDOW` tokens. With more `heads` than usual, an even number, layers are as much wider.
    """
    small = copy.deepcopy(settings)
    _shrink(small, heads)
    return small


def small_copy(
    kind: type[PreTrainedModel], settings: PreTrainedConfig, *, seed: int = 0
) -> PreTrainedModel:
    """A model of that class and those settings on the CPU in fp32, with large random weights.

    Freshly initialized ones are nearly uniform: what they see would hardly move their outputs.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        made: PreTrainedModel = kind._from_config(  # noqa: SLF001
            copy.deepcopy(settings), dtype=torch.float32
        )
        with torch.no_grad():
            for param in made.parameters():
                if param.is_floating_point():
                    noise = torch.randn(param.shape)
                    param.copy_(param + 0.1 * noise if param.ndim == 1 else 0.2 * noise)
    return made.eval()


def _shrink(settings: PreTrainedConfig, few: int) -> None:
    values = dict(vars(settings))
    heads = next((values[name] for name in _HEADS if isinstance(values.get(name), int)), None)
    context = values.get("max_position_embeddings")
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            _shrink(value, few)
        elif name in ("rope_parameters", "rope_scaling"):
            _set(settings, name, _small_rope(value))
        elif name in WINDOWS:
            _set(settings, name, _small_window(value, context))
        elif name in KEY_HEADS and isinstance(value, int):
            _set(settings, name, {1: 1, heads: few}.get(value, few // 2))
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            _set(settings, name, _small_size(name, value, few))
    words, hidden = (values.get(name) for name in ("word_embed_proj_dim", "hidden_size"))
    if isinstance(words, int) and words != hidden:  # there are projections between, as in OPT 350m
        _set(settings, "word_embed_proj_dim", _small_size("hidden_size", words, few) // 2)
    if getattr(settings, "quantization_config", None) is not None:
        delattr(settings, "quantization_config")  # not declared by the base class


def _set(settings: PreTrainedConfig, name: str, value: object) -> None:
    object.__setattr__(settings, name, value)  # without checks against sizes not yet changed


def _small_size(name: str, value: int, heads: int) -> int:
    if name in SPECIAL_TOKENS:
        return min(value, VOCABULARY - 1)
    if name in AT_MOST:
        return min(value, AT_MOST[name])
    if name in _WIDTHS or name in _INNER or name in _HEADS:
        return SIZES[name] * heads // HEADS
    return SIZES.get(name, value)


def _small_window(window: Any, context: object) -> Any:  # noqa: ANN401
    """A window that the context has no room for is never met, and stays."""
    if isinstance(window, list | tuple):
        return type(window)(_small_window(each, context) for each in window)
    if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
        return window
    return window if isinstance(context, int) and window >= context else WINDOW


def _small_rope(rope: Any) -> Any:  # noqa: ANN401
    """Without lists of a number for each frequency, of which there are fewer now."""
    if not isinstance(rope, dict):
        return rope
    small = {name: _small_rope(value) for name, value in rope.items()}
    if "mrope_section" in small:
        small["mrope_section"] = [1, 1, HEAD_SIZE // 2 - 2]
    if small.pop("long_factor", None) is not None:
        small.pop("short_factor", None)
        small |= {"rope_type": "default"}
        small.pop("type", None)
    return small
