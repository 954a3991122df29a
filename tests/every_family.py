"""Tiny configurations of every causal language model in `transformers`.

They are a family's defaults with few layers and small sizes. The settings below complete defaults
that don't describe a working model. `UNSUPPORTED` lists the families that a step can't load, and
why.
"""

import copy
import logging
import re
import textwrap
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipeline.models.forward.packing import detect_batching, small_copy, small_settings

ALL_FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

LISTED = (5, 23)
"""The version of `transformers` in docs/models.md and `requirements.lock`."""

LAYERS = 4
_CLASS_FIELDS = {"model_type", "transformers_version", "architectures"}
LAYER_COUNT_NAMES = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DECODER = {"is_decoder": True}
_WINDOW = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2}

_DECODERS = (
    *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("xlm-roberta", "xlm-roberta-xl"),
)
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_DECODERS, _DECODER),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _DELTA),
    **{name: {"sliding_window": 512} for name in ("mistral", "mixtral", "phimoe", "starcoder2")},
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3"), _WINDOW),
    "bamba": {**_MAMBA, "hidden_size": 32, "attn_layer_indices": [1, 3]},
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "blenderbot": {"encoder_layers": 2, "decoder_layers": 2, "num_hidden_layers": 2},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _PLAIN_ROPE, "sliding_attention": _PLAIN_ROPE}
    },
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "doge": {"keep_window_size": 6},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "rwkv": {"attention_hidden_size": 32, "hidden_size": 32},
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
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2, "is_encoder_decoder": False},
    "recurrent_gemma": {"lru_width": 32},
    "xmod": {**_DECODER, "default_language": "en_XX"},
}
"""Settings that a family's defaults omit or set to values that no generative model has."""


_FEW_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
SIZE_CHANGES: dict[str, dict[str, Any]] = {
    "dots3_note_text": {
        "head_dim": 16,
        "per_layer_config": {layer: {"kv_lora_rank": 8, **_FEW_HEADS} for layer in (2, 3)},
    },
    "xlnet": {"d_head": 8},
}
"""Settings that must fit the reduced sizes, so that a saved model can be loaded."""

_NOT_CAUSAL = "its outputs depend on later tokens, so it is refused"
_DRAFT_MODEL = "it is a draft model, which reads another model's hidden states"
_NOT_REDUCIBLE = "its defaults can't be reduced to a small model for the test"
_NOT_BUILDABLE = "`AutoModelForCausalLM` can't build it from its configuration"

UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys(("cpmant", "prophetnet", "xlnet"), _NOT_CAUSAL),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFT_MODEL),
    **dict.fromkeys(("emu3", "mllama", "musicgen", "musicgen_melody"), _NOT_BUILDABLE),
    "blt": "it reads bytes, grouped in patches",
    **dict.fromkeys(("bailing_hybrid", "kimi_linear", "xlm", "xlstm"), _NOT_REDUCIBLE),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text", "zamba", "zamba2"), _NOT_REDUCIBLE),
    "reformer": "its position embeddings require a fixed sequence length",
}
"""Families that can't be loaded as causal language models, or built by the tests, and why."""

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families -->", "<!-- end of families -->"

PACKED, PADDED, NOT_LOADED = "Packed", "Padded", "Not loaded, or not tried"


def tiny_settings(family: str) -> PreTrainedConfig:
    """Return small defaults with four layers; for multimodal families, the language model's."""
    defaults = AutoConfig.for_model(family)
    text = defaults.get_text_config(decoder=True)
    if any(value is text for value in vars(defaults).values()):
        defaults = text
    changes: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    family_changes = CHANGES.get(family, {}) | CHANGES.get(str(defaults.model_type), {})
    if "num_decoder_layers" not in family_changes:
        for name in LAYER_COUNT_NAMES:
            if isinstance(getattr(defaults, name, None), int):
                changes[name] = min(LAYERS, getattr(defaults, name))
    small = small_settings(type(defaults)(**changes | family_changes))
    size_changes = SIZE_CHANGES.get(small.model_type)
    if size_changes is None:
        return small
    values = small.to_dict() | size_changes
    return type(small)(**{name: values[name] for name in values if name not in _CLASS_FIELDS})


def tiny_model(family: str) -> PreTrainedModel:
    """Return a language model of the family with large random weights in fp32."""
    settings = tiny_settings(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(settings), dtype=torch.float32)
    return small_copy(type(model), settings)


def classify(family: str) -> tuple[str, str]:
    """Return the family's heading and reason in docs/models.md."""
    if family in UNSUPPORTED:
        return NOT_LOADED, UNSUPPORTED[family]
    run = detect_batching(tiny_model(family))
    if not run.causal:
        return NOT_LOADED, _NOT_CAUSAL
    if run.packed:
        return PACKED, ""
    reason = re.sub(r"^\w+ drops", "a layer drops", run.reason)
    return PADDED, re.sub(r" of a small copy differ by \S+ nats", " differ", reason)


def read_documented() -> dict[str, tuple[str, str]]:
    """Return the heading and reason by family in docs/models.md."""
    block = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    families: dict[str, tuple[str, str]] = {}
    heading = reason = ""
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", block):
        text = " ".join(paragraph.split())
        if text.startswith("### "):
            heading, reason = text.removeprefix("### "), ""
            continue
        if text.startswith("- "):
            reason, _, text = text.removeprefix("- ").partition(": ")
        families |= dict.fromkeys(re.findall(r"`([\w.-]+)`", text), (heading, reason))
    return families


def render(families: dict[str, tuple[str, str]]) -> str:
    """Return the block of docs/models.md."""
    lines = [BEGIN]
    for heading in (PACKED, PADDED, NOT_LOADED):
        lines += ["", f"### {heading}", ""]
        reasons = sorted({reason for kind, reason in families.values() if kind == heading})
        for reason in reasons:
            names = [f"`{name}`" for name, entry in families.items() if entry == (heading, reason)]
            text = ", ".join(names)
            lines += textwrap.wrap(
                f"- {reason}: {text}" if reason else text,
                100,
                subsequent_indent="  " if reason else "",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join([*lines, "", END])


if __name__ == "__main__":  # python -m tests.every_family writes the list into docs/models.md
    logging.disable()
    before = DOCS.read_text(encoding="utf-8")
    head, _, rest = before.partition(BEGIN)
    block = render({family: classify(family) for family in ALL_FAMILIES})
    DOCS.write_text(head + block + rest.partition(END)[2], encoding="utf-8")
