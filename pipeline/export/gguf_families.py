"""How GGUF names the settings and tensors of a family, and lays its matrices out.

The names are those of the GGUF specification (ggml-org/ggml, docs/gguf.md) and of llama.cpp's
`gguf` package.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import ModelError

Settings = Mapping[str, Any]

LLAMA_ROOT = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LLAMA_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2_ROOT = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
GPT2_BLOCK = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


@dataclass(frozen=True)
class Family:
    """A family of models that GGUF has a form for."""

    architecture: str
    root: Mapping[str, str]
    blocks: str
    """Prefix of the names of a block's tensors, before its number."""

    block: Mapping[str, str]
    keys: Callable[[Settings], dict[str, int | float | str]]
    """Settings, by their keys behind the architecture's name."""

    refused: Callable[[Settings], str | None]
    """The setting that llama.cpp has no form for, if there is one."""

    pairs: tuple[str, ...] = ()
    """Projections whose rotary halves llama.cpp has side by side."""

    transposed: tuple[str, ...] = ()
    """Matrices that the family stores as (inputs, outputs)."""

    def name(self, ours: str) -> str:
        """The name in the file of one of our tensors.

        Raises:
            ModelError: the family has no such tensor.
        """
        stem, _, leaf = ours.rpartition(".")
        if stem in self.root:
            return f"{self.root[stem]}.{leaf}"
        number, _, inner = stem.removeprefix(self.blocks).partition(".")
        if stem.startswith(self.blocks) and number.isdecimal() and inner in self.block:
            return f"blk.{number}.{self.block[inner]}.{leaf}"
        raise ModelError(
            f"{ours} is not a tensor that GGUF has a name for in the family {self.architecture};"
            " export it with --to onnx or --to merged"
        )

    def layout(self, ours: str, tensor: Tensor, settings: Settings) -> Tensor:
        """The tensor as llama.cpp multiplies by it: (outputs, inputs), rotary pairs adjacent."""
        if ours.endswith(self.pairs):
            return adjacent_pairs(tensor, _heads_of(ours, settings))
        return tensor.t() if ours.endswith(self.transposed) else tensor

    def original(self, ours: str, tensor: Tensor, settings: Settings) -> Tensor:
        """The inverse of `layout`."""
        if ours.endswith(self.pairs):
            return separate_halves(tensor, _heads_of(ours, settings))
        return tensor.t() if ours.endswith(self.transposed) else tensor


def adjacent_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Rows (head, half, i) as (head, i, half).

    `transformers` rotates row i of a head of d with row i + d/2, llama.cpp 2i with 2i + 1.
    """
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def separate_halves(tensor: Tensor, heads: int) -> Tensor:
    """The inverse of `adjacent_pairs`."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _heads_of(ours: str, settings: Settings) -> int:
    heads = int(settings["num_attention_heads"])
    is_key = ".k_proj." in ours
    return int(settings.get("num_key_value_heads") or heads) if is_key else heads


def rope_settings(settings: Settings) -> tuple[str, float, Mapping[str, Any]]:
    """Kind of rotary embedding, its base, and its other parameters."""
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    base = given.get("rope_theta", settings.get("rope_theta", 10000.0))
    return str(kind), float(base), given


def head_size(settings: Settings) -> int:
    """Width of an attention head."""
    return int(
        settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    )


def rope_factors(settings: Settings) -> Tensor | None:
    """What llama.cpp divides each rotary frequency by, (d / 2,); None for 1 of all.

    Llama 3.1's: long wavelengths by `factor`, short ones by 1, and between them interpolated
    (transformers, `_compute_llama3_parameters`).
    """
    kind, base, given = rope_settings(settings)
    if kind != "llama3":
        return None
    width = head_size(settings)
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = frequency * given["original_max_position_embeddings"] / (2 * math.pi)
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / given["factor"] + smooth)).float()


def _llama_keys(settings: Settings) -> dict[str, int | float | str]:
    heads = int(settings["num_attention_heads"])
    kind, base, given = rope_settings(settings)
    keys: dict[str, int | float | str] = {
        "context_length": int(settings["max_position_embeddings"]),
        "embedding_length": int(settings["hidden_size"]),
        "block_count": int(settings["num_hidden_layers"]),
        "feed_forward_length": int(settings["intermediate_size"]),
        "attention.head_count": heads,
        "attention.head_count_kv": int(settings.get("num_key_value_heads") or heads),
        "attention.layer_norm_rms_epsilon": float(settings["rms_norm_eps"]),
        "attention.key_length": head_size(settings),
        "attention.value_length": head_size(settings),
        "rope.dimension_count": head_size(settings),
        "rope.freq_base": base,
        "vocab_size": int(settings["vocab_size"]),
    }
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(given["factor"])}
    return keys


def _llama_refused(settings: Settings) -> str | None:
    kind = rope_settings(settings)[0]
    if kind not in ("default", "linear", "llama3"):
        return f"rope_type {kind}"
    if settings.get("hidden_act", "silu") != "silu":
        return f"hidden_act {settings['hidden_act']}"
    if settings.get("mlp_bias"):
        return "mlp_bias"
    is_local = settings.get("use_sliding_window", settings["model_type"] == "mistral")
    if is_local and settings.get("sliding_window") is not None:
        return f"sliding_window {settings['sliding_window']}"
    return None


def _gpt2_keys(settings: Settings) -> dict[str, int | float | str]:
    width = int(settings["n_embd"])
    return {
        "context_length": int(settings["n_positions"]),
        "embedding_length": width,
        "block_count": int(settings["n_layer"]),
        "feed_forward_length": int(settings.get("n_inner") or 4 * width),
        "attention.head_count": int(settings["n_head"]),
        "attention.layer_norm_epsilon": float(settings["layer_norm_epsilon"]),
    }


def _gpt2_refused(settings: Settings) -> str | None:
    activation = settings.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        return f"activation_function {activation}"
    if settings.get("scale_attn_by_inverse_layer_idx"):
        return "scale_attn_by_inverse_layer_idx"
    return None if settings.get("scale_attn_weights", True) else "scale_attn_weights false"


def _of_llama(architecture: str, *, pairs: tuple[str, ...] = ()) -> Family:
    return Family(
        architecture=architecture,
        root=LLAMA_ROOT,
        blocks="model.layers.",
        block=LLAMA_BLOCK,
        keys=_llama_keys,
        refused=_llama_refused,
        pairs=pairs,
    )


_PAIRS = tuple(f"{name}_proj.{leaf}" for name in ("q", "k") for leaf in ("weight", "bias"))
FAMILIES: Mapping[str, Family] = {
    "llama": _of_llama("llama", pairs=_PAIRS),
    "mistral": _of_llama("llama", pairs=_PAIRS),
    "qwen2": _of_llama("qwen2"),
    "qwen3": _of_llama("qwen3"),
    "gpt2": Family(
        architecture="gpt2",
        root=GPT2_ROOT,
        blocks="transformer.h.",
        block=GPT2_BLOCK,
        keys=_gpt2_keys,
        refused=_gpt2_refused,
        transposed=tuple(f"{name}.weight" for name in ("c_attn", "c_proj", "c_fc")),
    ),
}
"""By the model_type of config.json."""


def family_of(settings: Settings, path: str) -> Family:
    """The GGUF family of a model.

    Raises:
        ModelError: there is none, or a setting has no form in it.
    """
    kind = settings["model_type"]
    family = FAMILIES.get(kind)
    if family is None:
        raise ModelError(
            f"{path} is of the family {kind}, which has no GGUF form here; these have one:"
            f" {', '.join(FAMILIES)}; export it with --to onnx"
        )
    refused = family.refused(settings)
    if refused is not None:
        raise ModelError(
            f"{path} has {refused} in its config.json, which has no GGUF form; export it with"
            " --to onnx"
        )
    return family
