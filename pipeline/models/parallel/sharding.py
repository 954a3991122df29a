"""Tensor parallelism: which layers of a model are sharded among processes, and how.

As in Shoeybi et al. 2019 (Megatron-LM), section 3, the first of a pair of matrices is sharded by
outputs (column-parallel) and the second by inputs (row-parallel), and the results are summed once
per pair. Attention is sharded by heads. Plans come from `transformers`, or from `_PLANS` for
families without one there.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipeline.models.adapters.quantized import LinearLayer, QuantizedLinear, is_transposed
from pipeline.parallel.group import Group
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.system.errors import ConfigError, require


@dataclass(frozen=True)
class FamilyPlan:
    """How the layers of a model family are sharded."""

    styles: Mapping[str, str]
    """Sharding style of each layer, by a pattern of its name."""

    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes with numbers of heads or their elements, to be divided by the group size."""


_PLANS: Mapping[str, FamilyPlan] = {
    "opt": FamilyPlan(
        {
            **{f"decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
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
}


REPLICATED = ("replicate", "embedding")
"""Prefixes of styles that are not applied here; embeddings are sharded in `vocab_parallel`."""

KV_MODULES = ("k_proj", "v_proj")
"""Name suffixes of modules that compute keys or values."""

PACKED_MODULES = ("query_key_value", "c_attn")
"""Name suffixes of modules that compute queries, keys and values together."""


@dataclass(frozen=True)
class ShardStyle:
    """How a layer is sharded."""

    is_colwise: bool
    """Whether the outputs, rather than the inputs, are sharded."""

    parts: int = 1
    """Number of equal parts, each of which is sharded separately."""

    gathers_output: bool = False
    """Whether the outputs are gathered on all processes."""

    splits_input: bool = False
    """Whether the inputs are not yet sharded and must be split."""


STYLES: Mapping[str, ShardStyle] = {
    "colwise": ShardStyle(is_colwise=True),
    "colwise_three": ShardStyle(is_colwise=True, parts=3),
    "packed_colwise": ShardStyle(is_colwise=True, parts=2),
    "colwise_gather_output": ShardStyle(is_colwise=True, gathers_output=True),
    "rowwise": ShardStyle(is_colwise=False),
    "rowwise_split_input": ShardStyle(is_colwise=False, splits_input=True),
}


class TensorShards:
    """The sharded layers of a model in a tensor-parallel group; empty for one process.

    The model, on any device, is not changed before `set_local_sizes`. Error messages name the
    user's `setting`; `shards_head` says whether the output layer may be sharded.

    Raises:
        ConfigError: the family has no plan, or its layers or heads can't be sharded this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tp_group: Group,
        *,
        setting: str = "inference_tp_size",
        shards_head: bool = True,
    ) -> None:
        self.model, self.tp_group, self.size = model, tp_group, tp_group.size
        self.label = f"{setting} {self.size}"
        """The setting with its value."""
        self.shards_head = shards_head
        self.styles: dict[str, str] = {}
        """Style of each sharded module, by name."""
        if self.size == 1:
            return
        settings = model.config.get_text_config()
        self.family = str(model.config.model_type)
        self.plan = get_plan(model, setting=setting)
        self.num_heads = int(settings.num_attention_heads)
        self.kv_heads = int(getattr(settings, "num_key_value_heads", None) or self.num_heads)
        self.styles = dict(self._find_styles())
        self.shards_keys = any(
            name.endswith((*KV_MODULES, *PACKED_MODULES)) and not STYLES[style].gathers_output
            for name, style in self.styles.items()
        )
        self._check_heads()

    def _find_styles(self) -> Iterator[tuple[str, str]]:
        head, table = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        for name, _ in self.model.named_parameters():
            style = match(self.plan.styles, name)
            if style is not None and not style.startswith(REPLICATED):
                raise self.unsupported(f"sharding {name} as {style} is not supported")
        for name, module in self.model.named_modules():
            style = match(self.plan.styles, name)
            if style is None or style.startswith(REPLICATED):
                continue
            if module is head and not self.shards_head:
                continue
            layer = unwrap_lora(module)
            if not isinstance(layer, LinearLayer) or style not in STYLES:
                raise self.unsupported(f"sharding {name} as {style} is not supported")
            if style == "colwise_gather_output":
                # Not sharded if tied to the embedding table, which every process has.
                is_table = head is not None and layer is head and head.weight is table.weight
                outputs = layer.nf if isinstance(layer, Conv1D) else layer.out_features
                if is_table or outputs % self.size:
                    continue
            yield name, style

    def _check_heads(self) -> None:
        size = self.size
        if not self.styles:
            raise self.unsupported("its plan shards none of them")
        if not self.shards_keys:
            return
        require(
            self.num_heads % size == 0,
            f"{self.label} doesn't divide the {self.num_heads} attention heads of"
            f" {self.family}; choose a value that does",
        )
        packed = any(name.endswith(PACKED_MODULES) for name in self.styles)
        require(
            self.kv_heads % size == 0 or (size % self.kv_heads == 0 and not packed),
            f"{self.label} doesn't divide the {self.kv_heads} key/value heads of {self.family};"
            " choose a value that does",
        )

    def unsupported(self, reason: str) -> ConfigError:
        """Return the error for a model whose layers can't be sharded."""
        return ConfigError(
            f"{self.label}: the layers of {self.family} can't be sharded: {reason}; set it to 1"
        )

    @property
    def local_kv_heads(self) -> int:
        """Number of key/value heads on this process."""
        share = self.kv_heads // self.size if self.shards_keys else self.kv_heads
        return max(1, share)

    def spec(
        self, owner: str, leaf: str, shape: torch.Size, *, rank: int | None = None
    ) -> ShardSpec | None:
        """Return a process's shard of a weight with this full shape, or None if it isn't sharded.

        `owner` may be a matrix of an adapter: B is sharded like the outputs, A like the inputs.
        `rank` is the process's rank in the group; the default is this process.
        """
        owner, _, matrix = owner.partition(".lora_")
        owner = owner.removesuffix(".base_layer")
        name = self.styles.get(owner)
        if name is None:
            return None
        rank = self.tp_group.rank if rank is None else rank
        style = STYLES[name]
        if matrix and matrix.startswith("B") != style.is_colwise:
            return None
        transposed = not matrix and is_transposed(unwrap_lora(self.model.get_submodule(owner)))
        if leaf == "weight":
            dim = int(style.is_colwise == transposed)
            return ShardSpec(dim, tuple(self._iter_shards(owner, name, shape[dim], rank)))
        if style.is_colwise:
            return ShardSpec(0, tuple(self._iter_shards(owner, name, shape[0], rank)))
        # Only rank 0 adds the bias.
        full = (Shard(0, shape[0], is_first_copy=False),)
        return ShardSpec(0, full, zero=True) if rank > 0 else None

    def _iter_shards(self, owner: str, style: str, total: int, rank: int) -> Iterator[Shard]:
        size = self.size
        if owner.endswith(KV_MODULES) and not STYLES[style].gathers_output and self.kv_heads < size:
            width, copies = total // self.kv_heads, size // self.kv_heads
            head = rank // copies
            yield Shard(head * width, (head + 1) * width, copies, is_first_copy=rank % copies == 0)
        else:
            parts = STYLES[style].parts
            for part in range(parts):
                yield self._even_shard(owner, part * (total // parts), total // parts, rank)

    def _even_shard(self, owner: str, first: int, total: int, rank: int) -> Shard:
        """Return a process's equal share of the `total` elements that start at `first`."""
        require(
            total % self.size == 0,
            f"{self.label} doesn't divide the width {total} of {owner}; choose a value that does",
        )
        share = total // self.size
        start = first + rank * share
        return Shard(start, start + share)

    def set_local_sizes(self) -> None:
        """Set the widths and head counts of the modules to those of this process's shards."""
        for name in self.styles:
            self._set_local_widths(name, unwrap_lora(self.model.get_submodule(name)))
        for name, module in self.model.named_modules():
            for attribute in match(self.plan.counts, name) or ():
                setattr(module, attribute, getattr(module, attribute) // self.size)
            if hasattr(module, "num_key_value_groups") and self.shards_keys:
                share = self.num_heads // self.size
                object.__setattr__(module, "num_key_value_groups", share // self.local_kv_heads)

    def _set_local_widths(self, name: str, module: nn.Module) -> None:
        """Set a module's width attributes, which Conv1D uses."""
        if isinstance(module, Conv1D):
            module.nx, module.nf = self._local_shape(name, module.nx, module.nf)
        elif isinstance(module, nn.Linear):
            rows, columns = module.out_features, module.in_features
            module.out_features, module.in_features = self._local_shape(name, rows, columns)

    def _local_shape(self, name: str, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of this process's shard of a weight."""
        full = torch.Size((rows, columns))
        spec = self.spec(name, "weight", full)
        assert spec is not None
        rows, columns = spec.shape(full)
        return rows, columns


def unwrap_lora(module: nn.Module) -> nn.Module:
    """Return the layer inside an adapter, or the module itself."""
    return cast("nn.Module", module.base_layer) if isinstance(module, LoraLayer) else module


def can_shard(model: PreTrainedModel, size: int) -> bool:
    """Return whether a model can be sharded across `size` processes; quantized weights can't be."""
    try:
        layers = TensorShards(model, Group(0, tuple(range(size))))
        for name in layers.styles:
            layer = unwrap_lora(model.get_submodule(name))
            if isinstance(layer, QuantizedLinear):
                return False
            layers.spec(name, "weight", layer.get_parameter("weight").shape)
    except ConfigError:
        return False
    return True


def get_plan(model: PreTrainedModel, *, setting: str) -> FamilyPlan:
    """Return the plan for a model's family, keyed by the full names of its modules.

    Raises:
        ConfigError: there is no plan for the family.
    """
    builtin = FamilyPlan(getattr(model.config, "base_model_tp_plan", None) or {})
    plan = _PLANS.get(model.config.model_type) or builtin
    require(
        bool(plan.styles),
        f"{setting}: there is no sharding plan for {model.config.model_type}; set it to 1",
    )

    def add_prefix(keys: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{model.base_model_prefix}.{key}": value for key, value in keys.items()}

    head = {"lm_head": "colwise_gather_output", **(getattr(model, "_tp_plan", None) or {})}
    return FamilyPlan({**head, **add_prefix(plan.styles)}, add_prefix(plan.counts))


def match(table: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    """Return the value of the first key that matches the name (* stands for a number), or None."""
    for key, value in table.items():
        if re.fullmatch(re.escape(key).replace(r"\*", r"\d+"), name):
            return value
    return None
