"""Which layers of a model are divided among processes that compute each layer together, and how.

After Shoeybi et al. 2019 (Megatron-LM), 3: in pairs of matrices the first is cut by its outputs,
the second by its inputs, and what the processes find is summed once after each pair. Attention is
cut by whole heads. Plans are those of `transformers`; `pipeline/models/sharding_plans.py` has
families that it has none for.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipeline.errors import ConfigError, require
from pipeline.models.quantized import LinearLayer, weight_shape
from pipeline.models.sharding_plans import FamilyPlan, own_plan

REPLICATED = ("replicate", "embedding")
"""Beginnings of the styles of modules that every process has whole here: tables of embeddings are
looked up, not computed with."""

OF_KEYS = ("k_proj", "v_proj")
"""Modules with as many heads as there are of keys."""

PACKED = ("query_key_value", "c_attn")
"""Modules with queries, keys and values in one."""


@dataclass(frozen=True)
class Style:
    """How a layer is divided."""

    by_outputs: bool
    """Whether processes have outputs of it, rather than inputs."""

    parts: int = 1
    """Equal parts of which a process has its share of each."""

    joins: bool = False
    """Whether everyone needs the outputs of all."""

    splits: bool = False
    """Whether the inputs come whole."""


STYLES: Mapping[str, Style] = {
    "colwise": Style(by_outputs=True),
    "colwise_heads": Style(by_outputs=True),
    "colwise_three": Style(by_outputs=True, parts=3),
    "colwise_one_key_head": Style(by_outputs=True),
    "packed_colwise": Style(by_outputs=True, parts=2),
    "colwise_gather_output": Style(by_outputs=True, joins=True),
    "rowwise": Style(by_outputs=False),
    "rowwise_split_input": Style(by_outputs=False, splits=True),
}


class ShardedLayers:
    """The layers of a model of which each of `size` processes has a part; none for one process.

    Args:
        model: on any device.
        size: processes that compute each layer together.
        setting: that the user gave, as messages name it before the number.
        fix: what to do if they can't be divided.
        divides_head: whether the matrix that makes the logits may be divided.

    Raises:
        ConfigError: the family has no plan, or its heads or widths can't be cut into that many.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        size: int,
        *,
        setting: str = "inference_tp_size",
        fix: str = "set it to 1",
        divides_head: bool = True,
    ) -> None:
        self.model, self.size, self.fix = model, size, fix
        self.label = f"{setting}{size}" if setting.endswith(":") else f"{setting} {size}"
        """The setting with its number."""
        self.divides_head = divides_head
        self.styles: dict[str, str] = {}
        """Style of each module that is divided, by name."""
        if size == 1:
            return
        settings = model.config.get_text_config()
        self.family = str(model.config.model_type)
        self.plan = plan_of(model, setting=setting.partition(" ")[0], fix=fix)
        self.num_heads = int(settings.num_attention_heads)
        key_heads = self.plan.key_heads or getattr(settings, "num_key_value_heads", None)
        self.kv_heads = int(key_heads or self.num_heads)
        self.styles = dict(self._styles())
        self.divides_keys = any(
            name.endswith((*OF_KEYS, *PACKED)) and not STYLES[style].joins
            for name, style in self.styles.items()
        )
        self._check_heads()

    def _styles(self) -> Iterator[tuple[str, str]]:
        head, table = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        for name, _ in self.model.named_parameters():
            style = match(self.plan.styles, name)
            if style is not None and not style.startswith(REPLICATED):
                raise self.refused(f"{name} would be divided as {style}")
        for name, each in self.model.named_modules():
            style = match(self.plan.styles, name)
            if style is None or style.startswith(REPLICATED):
                continue
            if each is head and not self.divides_head:
                continue
            module = layer_of(each)
            if not isinstance(module, LinearLayer) or style not in STYLES:
                raise self.refused(f"{name} would be divided as {style}")
            if style == "colwise_gather_output":
                # Whole where it is the table of the embeddings, which every process has.
                is_table = head is not None and module is head and head.weight is table.weight
                if is_table or _outputs(module) % self.size:
                    continue
            yield name, style

    def by_width(self) -> Iterator[tuple[LinearLayer, Style]]:
        """Layers that are cut into equal parts wherever that is; heads of keys may be copied."""
        for name, kind in self.styles.items():
            module = layer_of(self.model.get_submodule(name))
            if not name.endswith(OF_KEYS) and kind != "colwise_one_key_head":
                assert isinstance(module, LinearLayer)
                yield module, STYLES[kind]

    def _check_heads(self) -> None:
        size = self.size
        if not self.styles:
            raise self.refused("none of its layers is divided")
        if not self.divides_keys:
            return
        require(
            self.num_heads % size == 0,
            f"{self.label} doesn't divide the {self.num_heads} attention heads of"
            f" {self.family}; choose one that does",
        )
        packed = any(name.endswith(PACKED) for name in self.styles)
        require(
            self.kv_heads % size == 0 or (size % self.kv_heads == 0 and not packed),
            f"{self.label} doesn't go with the {self.kv_heads} key heads of"
            f" {self.family}; choose one that divides them",
        )

    def refused(self, reason: str) -> ConfigError:
        """The error for a model whose layers can't be divided."""
        return ConfigError(
            f"{self.label}: the layers of {self.family} can't be divided, since {reason};"
            f" {self.fix}"
        )


def layer_of(module: nn.Module) -> nn.Module:
    """The layer inside its adapter, or the module itself."""
    return cast("nn.Module", module.base_layer) if isinstance(module, LoraLayer) else module


def can_shard(model: PreTrainedModel, size: int) -> bool:
    """Whether that many processes can compute each layer together; the model may be on meta."""
    try:
        layers = ShardedLayers(model, size)
    except ConfigError:
        return False
    return all(
        _outputs(module) % (style.parts * size) == 0
        if style.by_outputs
        else weight_shape(module).numel() // _outputs(module) % size == 0
        for module, style in layers.by_width()
    )


def plan_of(
    model: PreTrainedModel, *, setting: str = "inference_tp_size", fix: str = "set it to 1"
) -> FamilyPlan:
    """The plan for a model's family, by full names of its modules.

    Raises:
        ConfigError: there is none.
    """
    theirs = FamilyPlan(getattr(model.config, "base_model_tp_plan", None) or {})
    plan = own_plan(model.config) or theirs
    require(
        bool(plan.styles),
        f"{setting}: there is no plan to divide {model.config.model_type}; {fix}",
    )

    def named(keys: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{model.base_model_prefix}.{key}": value for key, value in keys.items()}

    head = {"lm_head": "colwise_gather_output", **(getattr(model, "_tp_plan", None) or {})}
    return replace(
        plan,
        styles={**head, **named(plan.styles)},
        counts=named(plan.counts),
        biased=tuple(named(dict.fromkeys(plan.biased))),
    )


def match(table: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    """The entry whose key names the module, with * for any number."""
    for key, value in table.items():
        if re.fullmatch(re.escape(key).replace(r"\*", r"\d+"), name):
            return value
    return None


def _outputs(module: LinearLayer) -> int:
    return int(module.nf if isinstance(module, Conv1D) else module.out_features)
