"""How to divide families that `transformers` has no tensor-parallel plan for.

Keys are names below the base model, with * for a layer's number, as in the configurations of
`transformers`; so are the styles, but for three of packed queries, keys and values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FamilyPlan:
    """What becomes of each layer, and what the layers must be told."""

    styles: Mapping[str, str]

    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes of modules that count heads or their elements: each process has its share."""

    biased: tuple[str, ...] = ()
    """Attention whose ALiBi bias, and perhaps its mask, comes with a row for each head."""


def _opt(config: Any) -> FamilyPlan:  # noqa: ANN401, ARG001
    layer = "decoder.layers.*"
    return FamilyPlan(
        {
            f"{layer}.self_attn.q_proj": "colwise",
            f"{layer}.self_attn.k_proj": "colwise",
            f"{layer}.self_attn.v_proj": "colwise",
            f"{layer}.self_attn.out_proj": "rowwise",
            f"{layer}.fc1": "colwise",
            f"{layer}.fc2": "rowwise",
        },
        counts={f"{layer}.self_attn": ("num_heads",)},
    )


def _gpt2(config: Any) -> FamilyPlan:  # noqa: ANN401, ARG001
    return FamilyPlan(
        {
            "h.*.attn.c_attn": "colwise_three",
            "h.*.attn.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        counts={"h.*.attn": ("num_heads", "split_size")},
    )


def _gpt_neo(config: Any) -> FamilyPlan:  # noqa: ANN401, ARG001
    return FamilyPlan(
        {
            "h.*.attn.attention.q_proj": "colwise",
            "h.*.attn.attention.k_proj": "colwise",
            "h.*.attn.attention.v_proj": "colwise",
            "h.*.attn.attention.out_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        counts={"h.*.attn.attention": ("num_heads",)},
    )


def _gptj(config: Any) -> FamilyPlan:  # noqa: ANN401, ARG001
    return FamilyPlan(
        {
            "h.*.attn.q_proj": "colwise",
            "h.*.attn.k_proj": "colwise",
            "h.*.attn.v_proj": "colwise",
            "h.*.attn.out_proj": "rowwise",
            "h.*.mlp.fc_in": "colwise",
            "h.*.mlp.fc_out": "rowwise",
        },
        counts={"h.*.attn": ("num_attention_heads",)},
    )


_PACKED_BY_HEAD = {
    "h.*.self_attention.query_key_value": "colwise_heads",
    "h.*.self_attention.dense": "rowwise",
    "h.*.mlp.dense_h_to_4h": "colwise",
    "h.*.mlp.dense_4h_to_h": "rowwise",
}


def _bloom(config: Any) -> FamilyPlan:  # noqa: ANN401, ARG001
    attention = "h.*.self_attention"
    return FamilyPlan(_PACKED_BY_HEAD, counts={attention: ("num_heads",)}, biased=(attention,))


def _falcon(config: Any) -> FamilyPlan:  # noqa: ANN401
    attention = "h.*.self_attention"
    one_key_head = config.multi_query and not config.new_decoder_architecture
    packed = f"{attention}.query_key_value"
    return FamilyPlan(
        {**_PACKED_BY_HEAD, **({packed: "colwise_one_key_head"} if one_key_head else {})},
        counts={attention: ("num_heads",) if one_key_head else ("num_heads", "num_kv_heads")},
        biased=(attention,) if config.alibi else (),
    )


OWN_PLANS: Mapping[str, Callable[[Any], FamilyPlan]] = {
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gptj": _gptj,
    "bloom": _bloom,
    "falcon": _falcon,
}
"""By model type: the plan for a configuration."""
