"""A second set of modules to generate with: of the trained model's class, plain and ungraded.

Its weights are the trained model's own where those lie whole and unchanged in memory, else copies
in an arena, made a unit at a time from what an engine gathers. Adapters are merged into copies,
and quantized weights are dequantized there.
Nothing of training - hooks, adapters, autograd - is in it, so that a process generates without the
others.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from jaxtyping import Int64, Shaped
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.tp_group import sum_
from inference.weights.arena import Arena, Place
from inference.weights.hash import bits_sum, hash_of_sums
from inference.weights.sharding import Sharding
from pipeline.engine.tensor_parts import Part, part_of, whole_shape
from pipeline.models.deferred import places
from pipeline.models.export import HasTurns
from pipeline.models.forward import base_model
from pipeline.models.lora import merged
from pipeline.models.quantized import QuantizedLinear
from pipeline.models.stream import meta_model
from pipeline.parallel.group import ALONE, Group
from pipeline.parallel.shards import ShardSpec


@dataclass
class Slot:
    """One weight of the replica: what it is made of, and where modules hold it."""

    name: str
    """Of the first place."""

    source: nn.Parameter
    """Of a quantized weight, its codes."""

    layer: QuantizedLinear | None
    """Whose weight it is, where that is quantized."""

    adapter: LoraLayer | None
    spec: ShardSpec | None
    """Which part of the source this process has; None is all of it."""

    part: Part | None
    """What the source is a part of, where this process trains a part of each layer."""

    shape: torch.Size
    place: Place | None = None
    """In the arena; None has the source's own memory."""

    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Of this process's part."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Its number format."""
        return self.source.dtype if self.layer is None else self.layer.dtype

    def show(self, weight: Tensor) -> None:
        """Have the modules hold `weight`."""
        param = nn.Parameter(weight, requires_grad=False)
        for module, leaf in self.places:
            setattr(module, leaf, param)

    def value(self, trained_by: Group) -> Shaped[Tensor, "*S"]:
        """What the weight is now, read from where its source lies gathered.

        Processes that train the parts of each layer join them here, unless they generate with the
        same parts.
        """
        own = self.source.detach() if self.layer is None else self.layer.dequantized()
        if self.adapter is not None:
            own = merged(own, self.adapter)
        if self.part is not None:
            if self.part.own == self.spec:
                return own
            own = self.part.joined(trained_by.gather(own, what="weights to generate with"))
        return own if self.spec is None else self.spec.of(own)


class InPlace:
    """The weights of a model that lies whole in this process, for `Replica.load`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def iter_gathered_units(self) -> Iterator[list[nn.Parameter]]:
        """All of them at once."""
        yield list(self._model.parameters())


class Replica:
    """The model to generate with, made of a trained one.

    Args:
        trained: a causal language model, plain or with peft's adapters.
        shares: whether its weights stay where they are, whole, between the uses of an engine.
        tp_group: the processes that compute each layer together in generation.
        trained_by: those that do so in training.

    Raises:
        ConfigError: the model can't be divided among so many processes.
    """

    def __init__(
        self,
        trained: nn.Module,
        *,
        shares: bool,
        tp_group: Group = ALONE,
        trained_by: Group = ALONE,
    ) -> None:
        plain = base_model(trained)
        self._plain = plain
        self.tp_group, self._trained_by = tp_group, trained_by
        settings = copy.deepcopy(plain.config)
        self.model = meta_model(lambda: _same_class(plain, settings))
        self.model.eval().requires_grad_(False)
        sharding = Sharding(self.model, tp_group)
        self._arena = Arena()
        self.slots = list(self._lay_out(sharding, shares=shares))
        sharding.apply()
        self._by_source: dict[nn.Parameter, list[Slot]] = {}
        for slot in self.slots:
            self._by_source.setdefault(slot.source, []).append(slot)
        self._share_buffers()
        self.release()

    def _lay_out(self, sharding: Sharding, *, shares: bool) -> Iterator[Slot]:
        """The weights, each under all of its places."""
        slots: dict[tuple[int, int, ShardSpec | None], Slot] = {}
        for name, module, leaf, _ in places(self.model):
            owner = name.rpartition(".")[0]
            source, layer, adapter = _source(self._plain, owner, leaf)
            part = part_of(source)
            whole = whole_shape(source) if layer is None else layer.shape
            spec = sharding.spec(owner, leaf, whole)
            key = id(source), id(adapter), spec
            if key not in slots:
                shape = whole if spec is None else spec.shape(whole)
                same = spec == (None if part is None else part.own)
                in_place = shares and layer is None and adapter is None and same
                slot = slots[key] = Slot(name, source, layer, adapter, spec, part, shape)
                if not in_place:
                    slot.place = self._arena.reserve(slot.num_bytes)
                yield slot
            slots[key].places.append((module, leaf))

    @property
    def shares(self) -> bool:
        """Whether any weight is the trained model's own."""
        return any(slot.place is None for slot in self.slots)

    @property
    def num_bytes(self) -> int:
        """Memory of the copies, while they are there."""
        return self._arena.num_bytes

    @property
    def loaded(self) -> bool:
        """Whether it has weights to generate with."""
        return self._arena.there

    @torch.no_grad()
    def load(self, weights: HasTurns) -> None:
        """Take the trained weights as they are now, a unit at a time.

        `weights` is the engine that trains the model; all its processes call it in step.
        """
        if not self.loaded:
            self._arena.allocate(self.slots[0].source.device)
            for slot in self.slots:
                slot.show(self._memory(slot))
        for params in weights.iter_gathered_units():
            for slot in (slot for param in params for slot in self._by_source.get(param, ())):
                if slot.place is not None:
                    self._memory(slot).copy_(slot.value(self._trained_by))
        self._share_buffers()

    def _memory(self, slot: Slot) -> Tensor:
        if slot.place is None:
            return slot.source.detach()
        return self._arena.at(slot.place).view(slot.dtype).view(slot.shape)

    def _share_buffers(self) -> None:
        """Have the trained model's buffers: some families change theirs as they read."""
        for name, module in self.model.named_modules():
            theirs = _plain_module(self._plain, name)
            for leaf, buffer in module.named_buffers(recurse=False):
                setattr(module, leaf, theirs.get_buffer(leaf).to(buffer.dtype))

    def release(self) -> None:
        """Give the memory back; the weights read as NaN until they are loaded again."""
        self._arena.release()
        for slot in self.slots:
            dtype, device = slot.dtype, slot.source.device
            nothing = float("nan") if dtype.is_floating_point else 0
            slot.show(torch.full((), nothing, dtype=dtype, device=device).expand(slot.shape))

    def weights_hash(self) -> int:
        """Of the weights that generation reads now, adapters merged: the same for any division.

        Its `tp_group` calls it in step.
        """
        sums = torch.stack([self._sum(slot, getattr(*slot.places[0])) for slot in self.slots])
        return hash_of_sums([slot.name for slot in self.slots], sum_(sums, self.tp_group))

    def _sum(self, slot: Slot, weight: Tensor) -> Int64[Tensor, ""]:
        """Of the bits that no peer before this one has."""
        if slot.spec is not None:
            parts = slot.spec.first_held(weight)
        else:
            parts = [(weight, 0)] if self.tp_group.rank == 0 else []
        none = torch.zeros((), dtype=torch.int64, device=weight.device)
        return sum((bits_sum(part, first=first) for part, first in parts), start=none)


def _same_class(plain: PreTrainedModel, settings: object) -> PreTrainedModel:
    return type(plain)._from_config(settings, dtype=plain.dtype)  # noqa: SLF001


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
