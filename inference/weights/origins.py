"""Where each weight of a replica comes from: a trained parameter, here or on another stage."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Shaped
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.engine.tensor_parts import Part, part_of, whole_shape
from pipeline.models.deferred import places
from pipeline.models.lora import merged
from pipeline.models.quantized import QuantizedLinear
from pipeline.parallel.group import Group
from pipeline.parallel.shards import ShardSpec


@dataclass(frozen=True)
class Origin:
    """What a weight is made of."""

    key: object
    """Equal for the several names of a tied weight, different for all other weights."""

    whole: torch.Size
    """Shape of the whole weight, of which this process may train a part."""

    dtype: torch.dtype
    """Its number format."""

    source: nn.Parameter | None
    """Of a quantized weight, its codes; None where another stage trains it."""

    layer: QuantizedLinear | None = None
    """Whose weight it is, where that is quantized."""

    adapter: LoraLayer | None = None

    part: Part | None = None
    """What the source is a part of, where this process trains a part of each layer."""

    @property
    def in_place(self) -> Tensor:
        """The weight where it is trained, without a copy."""
        assert self.source is not None
        return self.source.detach()

    def is_part(self, spec: ShardSpec | None) -> bool:
        """Whether this process trains this part of it, or all of it where that is None."""
        return self.source is not None and spec == (None if self.part is None else self.part.own)

    def lies_as(self, spec: ShardSpec | None) -> bool:
        """Whether that part lies in the memory of the trained model, between uses of an engine."""
        return self.layer is None and self.adapter is None and self.is_part(spec)

    def value(self) -> Shaped[Tensor, "*S"]:
        """What this process trains of it, read from where its source lies gathered."""
        own = self.in_place if self.layer is None else self.layer.dequantized()
        return own if self.adapter is None else merged(own, self.adapter)

    def whole_value(self, trained_by: Group) -> Shaped[Tensor, "*S"]:
        """All of it; processes that train the parts of each layer join them here."""
        own = self.value()
        if self.part is None:
            return own
        return self.part.joined(trained_by.gather(own, what="weights to generate with"))


class Origins:
    """Where each weight of a replica comes from.

    Args:
        trained: the plain model inside of adapters, of which this process may have a stage.
        replica: the whole model, on the meta device.
        stages: the processes that train its stages; they make it in step.
    """

    def __init__(self, trained: PreTrainedModel, replica: PreTrainedModel, stages: Group) -> None:
        self._trained = trained
        own = dict(self._own(replica))
        self._buffers: dict[str, Tensor] = {}
        if stages.size > 1:
            own = dict(_of_all_stages(own, replica, stages))
            for theirs in stages.gather_objects(_saved_buffers(trained)):
                self._buffers |= theirs
        self._by_name = own

    def of(self, name: str) -> Origin:
        """The origin of the replica's weight with this name."""
        return self._by_name[name]

    def buffer(self, module: str, leaf: str) -> Tensor | None:
        """The trained model's buffer; None where this stage lacks it and it is saved nowhere."""
        try:
            return _plain_module(self._trained, module).get_buffer(leaf)
        except AttributeError:
            saved = self._buffers.get(f"{module}.{leaf}")
            return None if saved is None else saved.to(next(self._trained.parameters()).device)

    def _own(self, replica: PreTrainedModel) -> Iterator[tuple[str, Origin]]:
        """The origins of weights that are trained here."""
        for name, _, leaf, _ in places(replica):
            try:
                source, layer, adapter = _source(self._trained, name.rpartition(".")[0], leaf)
            except AttributeError:  # it is another stage's
                continue
            whole = whole_shape(source) if layer is None else layer.whole_shape
            dtype = source.dtype if layer is None else layer.dtype
            part = part_of(source) if layer is None else layer.part
            key = id(source), id(adapter)
            yield name, Origin(key, whole, dtype, source, layer, adapter, part)


def _of_all_stages(
    own: dict[str, Origin], replica: PreTrainedModel, stages: Group
) -> Iterator[tuple[str, Origin]]:
    """The origin of each weight on the first stage that trains it, under whatever name."""
    tied: dict[nn.Parameter, list[str]] = {}
    for name, _, _, param in places(replica):
        tied.setdefault(param, []).append(name)
    formats = stages.gather_objects({name: (o.whole, o.dtype) for name, o in own.items()})
    for names in tied.values():
        rank, first = next(
            (rank, name) for rank, theirs in enumerate(formats) for name in names if name in theirs
        )
        whole, dtype = formats[rank][first]
        origin = own[first] if rank == stages.rank else Origin(first, whole, dtype, None)
        for name in names:
            yield name, origin


def _saved_buffers(trained: PreTrainedModel) -> dict[str, Tensor]:
    """Buffers that the files of a model have, on the host; mostly there are none."""
    buffers = {name.replace(".base_layer.", "."): each for name, each in trained.named_buffers()}
    saved = {name.replace(".base_layer.", ".") for name in trained.state_dict()}
    return {name: each.cpu() for name, each in buffers.items() if name in saved}


def _plain_module(plain: PreTrainedModel, name: str) -> nn.Module:
    """A module without its adapter."""
    module = plain.get_submodule(name)
    return cast("nn.Module", module.base_layer) if isinstance(module, LoraLayer) else module


def _source(
    plain: PreTrainedModel, owner: str, leaf: str
) -> tuple[nn.Parameter, QuantizedLinear | None, LoraLayer | None]:
    """The trained weight under a name, its layer if it is quantized, and what adapts it."""
    module, layer = plain.get_submodule(owner), _plain_module(plain, owner)
    adapter = module if isinstance(module, LoraLayer) and leaf == "weight" else None
    if isinstance(layer, QuantizedLinear) and leaf == "weight":
        return layer.get_parameter("codes"), layer, adapter
    return layer.get_parameter(leaf), None, adapter
