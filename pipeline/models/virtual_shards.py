"""Which virtual parts a model's layers are computed as, and where they lie in a process's weights.

They are what as many processes would have as there are parts (`tensor_shards.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from pipeline.engine.tensor_parts import Part, part_of, whole_shape
from pipeline.errors import require
from pipeline.models.adapter_dropout import AdapterDropout
from pipeline.models.adapter_parts import divide_adapter
from pipeline.models.dora import Dora
from pipeline.models.layer_variant import variant_in
from pipeline.models.part_by_part import DividedLayer, Place, compute_by_parts, sum_of_columns
from pipeline.models.principal import Principal
from pipeline.models.quantized import (
    LinearLayer,
    is_transposed,
    part_of_weight,
    whole_weight_shape,
)
from pipeline.models.sharding import STYLES, layer_of, match
from pipeline.models.tensor_shards import TensorShards
from pipeline.parallel.group import Group
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.parallel.virtual_parts import VirtualParts

SETTING = "parallel.arithmetic invariant:"


_COUNT = "virtual_parts"
"""Attribute in which a model has the number of its virtual parts."""


def virtual_parts_of(model: nn.Module) -> int | None:
    """How many virtual parts a model's layers are computed as; None of any other model."""
    return getattr(model, _COUNT, None)


class VirtualShards(TensorShards):
    """What each virtual part has of a model's layers.

    Args:
        model: on any device; nothing is changed before `apply`.
        parts: which there are.

    Raises:
        ConfigError: the family has no plan, or its heads or widths can't be cut into so many.
    """

    def __init__(self, model: PreTrainedModel, parts: VirtualParts) -> None:
        count = parts.count
        everyone = Group(0, tuple(range(count)))
        super().__init__(model, everyone, setting=SETTING, fix="take fast", divides_head=False)
        self._parts = parts
        if self.divides_keys:
            self._check_key_heads()
        for kind in self.styles.values():
            style = STYLES[kind]
            if style.joins or style.splits:
                raise self.refused(f"layers are divided as {kind}")
        self._by_owner = dict(self._owners())

    def _check_key_heads(self) -> None:
        """Each part has key heads of its own: gradients of one that several use would be theirs."""
        keys = 1 if "colwise_one_key_head" in self.styles.values() else self.kv_heads
        most = keys & -keys  # the largest power of two that divides them
        heads = "key head" if keys == 1 else "key heads"
        require(
            keys % self.size == 0,
            f"{self.label} doesn't divide the {keys} {heads} of {self.family}; take"
            f" {'fast' if most == 1 else f'invariant:{most}'}",
        )

    def _owners(self) -> Iterator[tuple[str, list[str]]]:
        """Modules, each with its divided layers, of which the last alone is divided by inputs."""
        found: dict[str, list[str]] = {}
        for name in self.styles:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        for owner, names in found.items():
            ordered = sorted(names, key=lambda name: not STYLES[self.styles[name]].by_outputs)
            by_inputs = [name for name in names if not STYLES[self.styles[name]].by_outputs]
            is_pair = len(names) == 2 or not self._is_block(owner)
            if len(by_inputs) != 1 or len(names) == 1 or not is_pair:
                raise self.refused(f"{owner} has no one layer that ends it")
            yield owner, ordered

    def _is_block(self, owner: str) -> bool:
        return isinstance(self.model.get_submodule(owner), GradientCheckpointingLayer)

    def apply(self, cut: Callable[[str], object]) -> None:
        """Have the modules compute their parts; `cut` leaves this process's of a named layer."""
        for owner, names in self._by_owner.items():
            for name in names:
                cut(name)
            layers = [self._divided(name) for name in names]
            module = self.model.get_submodule(owner)
            is_biased = match(dict.fromkeys(self.plan.biased, True), owner)
            compute_by_parts(
                module,
                self._parts,
                layers,
                is_block=self._is_block(owner),
                own_heads=self.heads_of if is_biased else None,
            )
        self.narrow(hooks=False)
        setattr(self.model, _COUNT, self.size)

    def add_up(self) -> None:
        """Have the layers that are divided by inputs add up the parts, to generate with.

        All else is computed at once: of a product the columns, and of attention the heads, come out
        as by themselves.
        """
        for names in self._by_owner.values():
            layer = layer_of(self.model.get_submodule(names[-1]))
            assert isinstance(layer, nn.Linear | Conv1D)
            object.__setattr__(layer, "forward", partial(sum_of_columns, layer, self._parts))

    def _divided(self, name: str) -> DividedLayer:
        module = self.model.get_submodule(name)
        layer = cast("LinearLayer", layer_of(module))
        by_outputs = STYLES[self.styles[name]].by_outputs
        pieces: dict[Place, list[ShardSpec]] = {(layer, "weight"): self._pieces(name, layer)}
        if by_outputs and layer.bias is not None:
            pieces[layer, "bias"] = self._pieces(name, layer, "bias")
        if not isinstance(module, LoraLayer):
            return DividedLayer(module, layer, pieces)
        of_weight = self._specs(name, layer, "weight")
        for owner, leaf in _cut_of_adapter(module, by_outputs=by_outputs):
            own = part_of(owner.get_parameter(leaf))
            specs = [replace(spec, dim=int(not by_outputs)) for spec in of_weight]
            pieces[owner, leaf] = [_inside(own, spec) for spec in specs]
        return DividedLayer(module, layer, pieces, self._divide_adapter(module, layer, of_weight))

    def _divide_adapter(
        self, module: LoraLayer, layer: LinearLayer, of_weight: Sequence[ShardSpec]
    ) -> Callable[[], None] | None:
        """Have an adapter compute by parts; what it is to compute before the first of them."""
        by_rows = of_weight[0].dim == int(is_transposed(layer))
        places = [_inside(part_of_weight(layer), spec) for spec in of_weight]
        own = [replace(each, dim=int(not by_rows)) for each in places]
        divide_adapter(module, replace(self._parts, group=self._parts.group.apart), own)
        dropout, variant = module.lora_dropout["default"], variant_in(module)
        if by_rows:
            return None
        if isinstance(dropout, AdapterDropout):
            dropout.divide(whole_weight_shape(layer)[of_weight[0].dim], of_weight)
        return partial(variant.measure, module) if isinstance(variant, Dora) else None

    def _pieces(self, name: str, layer: LinearLayer, leaf: str = "weight") -> list[ShardSpec]:
        """Where each part's elements lie in what this process has of a parameter."""
        own = part_of_weight(layer) if leaf == "weight" else part_of(layer.get_parameter(leaf))
        return [_inside(own, spec) for spec in self._specs(name, layer, leaf)]

    def _specs(self, name: str, layer: LinearLayer, leaf: str) -> list[ShardSpec]:
        """What each part of this process has of the whole parameter."""
        is_weight = leaf == "weight"
        shape = whole_weight_shape(layer) if is_weight else whole_shape(layer.get_parameter(leaf))
        specs = [self.spec(name, leaf, shape, rank=number) for number in self._parts.own]
        return [spec for spec in specs if spec is not None]


def _cut_of_adapter(module: LoraLayer, *, by_outputs: bool) -> Iterator[Place]:
    """What of an adapter is divided with its layer."""
    half = module.lora_B if by_outputs else module.lora_A
    yield cast("nn.Module", half["default"]), "weight"
    variant = variant_in(module)
    if isinstance(variant, Dora) and by_outputs:
        yield module.lora_magnitude_vector["default"], "weight"
    if isinstance(variant, Principal):
        down, up = variant.first(module)
        yield up if by_outputs else down, "default"


def _inside(own: Part | None, of_part: ShardSpec) -> ShardSpec:
    """Where the elements of a part lie in what this process has, which has all of them."""
    if own is None:
        return of_part
    shards = [
        Shard(begin + each.start - have.start, begin + each.stop - have.start)
        for each in of_part.shards
        for have, begin in own.own.placed()
        if have.start <= each.start and each.stop <= have.stop
    ]
    return ShardSpec(of_part.dim, tuple(shards))
