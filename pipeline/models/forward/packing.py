"""Decides whether a model's sequences can be packed into one row or must be padded.

Sequences are packed if all layers of the model use plain causal attention. Settings don't fully
determine this: some layers drop the keyword with the sequence boundaries, some add a learned bias
to the mask, and some express their window only in the mask. So a small copy of the model is run:
its output for a sequence must be the same whether the sequence is packed with others or alone.

The result depends on the model's class and settings, not on its weights. It is therefore the same,
without communication, on every process and at every ZeRO stage, before the weights are loaded, with
adapters, and in every data type.
"""

import copy
import functools
import logging
import math
import warnings
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.data.batches import TokenBatch
from pipeline.models.forward.attention import KEY_BLOCK, RAGGED, MissingLayoutError, Ragged
from pipeline.models.forward.forward import Backbone, ragged_inputs
from pipeline.system.errors import one_line

HEADS = 4
HEAD_SIZE = 8
WIDTH = HEADS * HEAD_SIZE
INNER = 48
VOCABULARY = 64
WINDOW = 4
"""Length of the copy's sliding windows and chunks, short enough for a dozen tokens to exceed it."""

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
        "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads",
        "encoder_attention_heads",
    ),
    HEADS,
)  # fmt: skip
_HEAD_SIZES = dict.fromkeys(
    (
        "head_dim", "d_kv", "kv_channels", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "global_head_dim", "attention_head_dim", "swa_head_dim", "swa_v_head_dim",
    ),
    HEAD_SIZE,
)  # fmt: skip
_RANKS = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), HEAD_SIZE)
_EXPERTS = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_expert"), 4
)
_EXPERTS_PER_TOKEN = dict.fromkeys(
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
"""Settings of a copy by name; those that a model doesn't have are not added."""

MAX_SIZES: dict[str, int] = {**_EXPERTS, **_EXPERTS_PER_TOKEN, **_GROUPS}
"""Upper bounds of a copy's settings, which are otherwise the model's."""

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
    """Return the settings with reduced sizes, but the same number of layers of each kind.

    Heads that share keys in the model still share them, a token still uses only some experts, and
    windows are `WINDOW` tokens. A larger even number of `heads` makes layers proportionally wider.
    """
    small = copy.deepcopy(settings)
    _shrink(small, heads)
    return small


def small_copy(model_class: type[PreTrainedModel], settings: PreTrainedConfig) -> PreTrainedModel:
    """Build a model of this class and settings, in fp32 on the CPU, with large random weights.

    The weights are the same in each call. With the usual initialization, attention would be nearly
    uniform, and outputs would hardly depend on what a token attends to.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed GPUs
        model: PreTrainedModel = model_class._from_config(  # noqa: SLF001
            copy.deepcopy(settings), dtype=torch.float32
        )
        with torch.no_grad():
            for param in model.parameters():
                if param.is_floating_point():
                    noise = torch.randn(param.shape)
                    param.copy_(param + 0.1 * noise if param.ndim == 1 else 0.2 * noise)
    return model.eval()


def _shrink(settings: PreTrainedConfig, num_heads: int) -> None:
    values = dict(vars(settings))
    heads = next((values[name] for name in _HEADS if isinstance(values.get(name), int)), None)
    context = values.get("max_position_embeddings")
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            _shrink(value, num_heads)
        elif name in ("rope_parameters", "rope_scaling"):
            _set(settings, name, _small_rope(value))
        elif name in WINDOWS:
            _set(settings, name, _small_window(value, context))
        elif name in KEY_HEADS and isinstance(value, int):
            _set(settings, name, {1: 1, heads: num_heads}.get(value, num_heads // 2))
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            _set(settings, name, _small_size(name, value, num_heads))
    width, hidden = (values.get(name) for name in ("word_embed_proj_dim", "hidden_size"))
    if isinstance(width, int) and width != hidden:  # embeddings are projected, as in OPT-350m
        _set(settings, "word_embed_proj_dim", _small_size("hidden_size", width, num_heads) // 2)
    if getattr(settings, "quantization_config", None) is not None:
        delattr(settings, "quantization_config")  # not declared by the base class


def _set(settings: PreTrainedConfig, name: str, value: object) -> None:
    object.__setattr__(settings, name, value)  # bypasses checks against sizes not yet changed


def _small_size(name: str, value: int, heads: int) -> int:
    if name in SPECIAL_TOKENS:
        return min(value, VOCABULARY - 1)
    if name in MAX_SIZES:
        return min(value, MAX_SIZES[name])
    if name in _WIDTHS or name in _INNER or name in _HEADS:
        return SIZES[name] * heads // HEADS
    return SIZES.get(name, value)


def _small_window(window: Any, context: object) -> Any:  # noqa: ANN401
    """Return a copy's window; a window larger than the context has no effect and is unchanged."""
    if isinstance(window, list | tuple):
        return type(window)(_small_window(item, context) for item in window)
    if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
        return window
    return window if isinstance(context, int) and window >= context else WINDOW


def _small_rope(rope: Any) -> Any:  # noqa: ANN401
    """Return the RoPE settings without per-frequency lists, whose length no longer fits."""
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


logger = logging.getLogger(__name__)

LENGTHS = (7, 12, 5)
"""Lengths of the compared sequences, all longer than the copy's windows; adjacent ones differ."""

TOLERANCE = 0.01
"""Maximum difference in nats between packed and separate sequences. Rounding changes a copy in fp32
by 1e-6 to 1e-4; attending to one token too many or too few, by 0.1 or more."""

LEAK_TOLERANCE = 0.01
"""Maximum change in earlier log-probabilities, in nats, that is ascribed to rounding."""


@dataclass(frozen=True)
class Batching:
    """How a model's sequences are batched: packed or padded."""

    packed: bool
    """Whether sequences are packed into one row; otherwise those of similar length are padded."""

    reason: str = ""
    """The reason why they are padded; empty if they are packed."""

    causal: bool = True
    """Whether the output for a token is independent of later tokens, as it must be."""


def detect_batching(model: PreTrainedModel) -> Batching:
    """Choose packing if it does not change results, else padding; log a reason found by a trial.

    The model's weights are not used, so it may be on the meta device.
    """
    reason = find_unsupported_attention(model)
    if getattr(model, "_is_stateful", False):
        return Batching(packed=False, reason=str(reason))  # slow to test, and always causal
    return _probe_batching(Family.from_model(model), reason)


def find_unsupported_attention(model: PreTrainedModel) -> str | None:
    """Return a reason why layers are not plain causal attention, or None if none is known."""
    settings = model.config.get_text_config()
    layers = set(getattr(settings, "layer_types", None) or ())
    others = ", ".join(sorted(layers - {"full_attention", "sliding_attention"}))
    reasons = {
        "it has recurrent layers": getattr(model, "_is_stateful", False),
        f"it has layers of type {others}": others,
        "its attention code can't be replaced by an attention function": not getattr(
            model, "_supports_attention_backend", False
        ),
        "its attention has linear biases (ALiBi)": getattr(settings, "alibi", False),
        "its attention scores are soft-capped": getattr(settings, "attn_logit_softcapping", None)
        is not None,
        "it uses attention sinks": any(
            name.endswith(".sinks") for name, _ in model.named_parameters()
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


@dataclass(frozen=True)
class Family:
    """Models of one class with equal small copies: one trial decides whether all can be packed."""

    model_class: type[PreTrainedModel]
    settings_json: str
    settings: PreTrainedConfig = field(compare=False)
    """Settings of a small copy."""

    @classmethod
    def from_model(cls, model: PreTrainedModel, *, heads: int = HEADS) -> "Family":
        """Return the family of a model."""
        settings = small_settings(model.config, heads=heads)
        settings.name_or_path = ""
        return cls(type(model), settings.to_json_string(use_diff=False), settings)

    def copy(self, *, packed: bool = False) -> PreTrainedModel:
        """Build a small model, the same each time, optionally with attention over packed rows."""
        model = small_copy(self.model_class, self.settings)
        if packed:
            model.set_attn_implementation(RAGGED)
        return model


def small_hidden_states(model: PreTrainedModel) -> Float[Tensor, "1 N X"]:
    """Return a small copy's last hidden states for a few tokens, packed if attention is ragged."""
    is_packed = model.config._attn_implementation == RAGGED  # noqa: SLF001
    lengths = (7, 5) if is_packed else (KEY_BLOCK,)  # padded lengths are multiples of it
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY, (sum(lengths),), generator=generator).to(model.device)
    backbone = cast("Backbone", model.base_model)
    if not is_packed:
        return backbone(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]))[0]
    batch = TokenBatch(ids, lengths, ids[:0])
    return backbone(**ragged_inputs(batch, Ragged(lengths, ids.device, kernels="off")))[0]


@functools.cache
def _probe_batching(family: Family, reason: str | None) -> Batching:
    """Decide by a trial how models of a family are run; `reason` is a known reason to pad."""
    causal = True
    is_known = reason is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = family.copy()
            causal = measure_leak(model) <= LEAK_TOLERANCE
            difference = 0.0 if is_known else packing_difference(model)
    except MissingLayoutError as error:
        reason = f"{error}, so tokens would attend to other sequences"
    except Exception as error:  # noqa: BLE001  # model code may raise anything; padding may still work
        reason = reason or f"a small copy of it can't be run ({one_line(error)})"
    else:
        if difference > TOLERANCE:
            reason = (
                f"log-probabilities of a small copy differ by {difference:.2g} nats between packed"
                " and separate sequences"
            )
    if reason is None:
        return Batching(packed=True, causal=causal)
    if not is_known:
        logger.info("%s runs padded, not packed: %s", family.settings.model_type, reason)
    return Batching(packed=False, reason=reason, causal=causal)


@torch.no_grad()
def measure_leak(model: PreTrainedModel) -> float:
    """Return the largest change, in nats, that the last token causes in earlier log-probabilities.

    It is 0 for causal models. The last token is replaced and, since ProphetNet's code mixes up
    positions so that log-probabilities depend on the length of the whole text, also removed. The
    few tokens fit in the window of any learned mask.
    """
    ids, prefix = _probe_tokens()[: max(LENGTHS)], _probe_tokens()[: min(LENGTHS)]
    other = torch.cat([ids[:-1], ids[-1:] ^ 1])
    original, replaced, full, shortened = (
        _run(model, {"input_ids": row[None]}) for row in (ids, other, prefix, prefix[:-1])
    )
    return max(_max_abs(original[:-1] - replaced[:-1]), _max_abs(full[:-1] - shortened))


@torch.no_grad()
def packing_difference(model: PreTrainedModel) -> float:
    """Return the largest log-probability difference between packed and separate sequences, in nats.

    The model is left with ragged attention.

    Raises:
        MissingLayoutError: a layer doesn't receive the sequence boundaries.
    """
    ids = _probe_tokens()
    batch = TokenBatch(ids, LENGTHS, ids[:0])
    separate = torch.cat([_run(model, {"input_ids": row[None]}) for row in ids.split(LENGTHS)])
    model.set_attn_implementation(RAGGED)
    packed = _run(model, ragged_inputs(batch, Ragged(LENGTHS, ids.device, kernels="off")))
    return _max_abs(packed - separate)


def _probe_tokens() -> Int[Tensor, " N"]:
    return torch.randint(4, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def _max_abs(difference: Tensor) -> float:
    largest = difference.abs().max().item()
    return math.inf if math.isnan(largest) else largest


def _run(model: PreTrainedModel, inputs: dict[str, Any]) -> Float[Tensor, "N X"]:
    """Return log-probabilities over the vocabulary, or hidden states of a model without a head."""
    if model.get_output_embeddings() is not None:
        return model(**inputs).logits[0].float().log_softmax(dim=-1)
    return cast("Backbone", model.base_model)(**inputs)[0][0].float()
