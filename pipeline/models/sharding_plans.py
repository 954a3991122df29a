"""How to divide families that `transformers` has no tensor-parallel plan for.

Keys are names below the base model, with * for a layer's number, as in the configurations of
`transformers`; so are the styles, but for three of packed queries, keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FamilyPlan:
    """What becomes of each layer, and which attributes of the layers change."""

    styles: Mapping[str, str]

    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes of modules that count heads or their elements: each process has its share."""

    biased: tuple[str, ...] = ()
    """Attention whose ALiBi bias, and perhaps its mask, comes with a row for each head."""

    key_heads: int | None = None
    """Heads of keys, where the configuration has them under a name of its own."""


def own_plan(config: Any) -> FamilyPlan | None:  # noqa: ANN401
    """The plan for a configuration's family; None where it isn't one of these."""
    if config.model_type == "falcon":
        return _falcon(config)
    return _PLANS.get(config.model_type)


def _falcon(config: Any) -> FamilyPlan:  # noqa: ANN401
    """Falcon has one head of keys, or some, or as many as of queries."""
    grouped = config.new_decoder_architecture
    one_key_head = config.multi_query and not grouped
    packed = {"h.*.self_attention.query_key_value": "colwise_one_key_head"}
    counts = ("num_heads",) if one_key_head else ("num_heads", "num_kv_heads")
    return FamilyPlan(
        {**_PACKED_BY_HEAD, **(packed if one_key_head else {})},
        counts={"h.*.self_attention": counts},
        biased=("h.*.self_attention",) if config.alibi else (),
        key_heads=config.num_kv_heads if grouped else None,
    )


_PACKED_BY_HEAD = {
    "h.*.self_attention.query_key_value": "colwise_heads",
    "h.*.self_attention.dense": "rowwise",
    "h.*.mlp.dense_h_to_4h": "colwise",
    "h.*.mlp.dense_4h_to_h": "rowwise",
}

_PLANS: Mapping[str, FamilyPlan] = {
    "opt": FamilyPlan(
        {
            "decoder.layers.*.self_attn.q_proj": "colwise",
            "decoder.layers.*.self_attn.k_proj": "colwise",
            "decoder.layers.*.self_attn.v_proj": "colwise",
            "decoder.layers.*.self_attn.out_proj": "rowwise",
            "decoder.layers.*.fc1": "colwise",
            "decoder.layers.*.fc2": "rowwise",
        },
        counts={"decoder.layers.*.self_attn": ("num_heads",)},
    ),
    "gpt2": FamilyPlan(
        {
            "h.*.attn.c_attn": "colwise_three",
            "h.*.attn.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        counts={"h.*.attn": ("num_heads", "split_size")},
    ),
    "gpt_neo": FamilyPlan(
        {
            "h.*.attn.attention.q_proj": "colwise",
            "h.*.attn.attention.k_proj": "colwise",
            "h.*.attn.attention.v_proj": "colwise",
            "h.*.attn.attention.out_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        counts={"h.*.attn.attention": ("num_heads",)},
    ),
    "gptj": FamilyPlan(
        {
            "h.*.attn.q_proj": "colwise",
            "h.*.attn.k_proj": "colwise",
            "h.*.attn.v_proj": "colwise",
            "h.*.attn.out_proj": "rowwise",
            "h.*.mlp.fc_in": "colwise",
            "h.*.mlp.fc_out": "rowwise",
        },
        counts={"h.*.attn": ("num_attention_heads",)},
    ),
    "bloom": FamilyPlan(
        _PACKED_BY_HEAD,
        counts={"h.*.self_attention": ("num_heads",)},
        biased=("h.*.self_attention",),
    ),
}
