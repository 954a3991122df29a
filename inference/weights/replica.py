"""A second set of modules to generate with: of the trained model's class, plain and ungraded.

Its weights are the trained model's own where those lie whole and unchanged in memory, else copies
in an arena, made a unit at a time from what an engine gathers. Adapters are merged into copies,
and quantized weights are dequantized there. What another stage of a pipeline trains comes from it.
Nothing of training - hooks, adapters, autograd - is in it, so that a process generates without the
others.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64, Shaped, UInt8
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.tp_group import mark_sharing, sum_
from inference.weights.hash import bits_sum, hash_of_sums
from inference.weights.origins import Origin, Origins
from inference.weights.sharding import Sharding
from pipeline.models.attention import round_up
from pipeline.models.deferred import meta_model, places
from pipeline.models.export import HasTurns
from pipeline.models.forward import base_model
from pipeline.parallel.group import ALONE, Group
from pipeline.parallel.shards import ShardSpec

ALIGNMENT = 64
"""Bytes: each tensor begins at a cache line."""

BLOCK_BYTES = 128 * 2**20
"""Bytes of a block at most, unless one tensor alone has more."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    block: int
    start: int
    num_bytes: int


class Arena:
    """Memory for many tensors that is allocated and released as a whole.

    It consists of the same blocks each time, so that the allocator can reuse fragmented memory.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._blocks: list[UInt8[Tensor, " n"]] | None = None

    def reserve(self, num_bytes: int) -> Place:
        """The place of one more tensor."""
        start = round_up(self._sizes[-1], ALIGNMENT) if self._sizes else 0
        if not self._sizes or start + num_bytes > BLOCK_BYTES:
            self._sizes.append(0)
            start = 0
        self._sizes[-1] = start + num_bytes
        return Place(len(self._sizes) - 1, start, num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, whether there is memory for them or not."""
        return sum(self._sizes)

    @property
    def there(self) -> bool:
        """Whether there is memory."""
        return self._blocks is not None

    def allocate(self, device: torch.device) -> None:
        """Have memory, of undefined content."""
        self._blocks = [torch.empty(n, dtype=torch.uint8, device=device) for n in self._sizes]

    def release(self) -> None:
        """Give the memory back, once no tensor refers to it."""
        self._blocks = None

    def at(self, place: Place) -> UInt8[Tensor, " n"]:
        """The bytes of a place."""
        assert self._blocks is not None
        return self._blocks[place.block][place.start : place.start + place.num_bytes]


@dataclass
class Slot:
    """One weight of the replica: what it is made of, and where modules hold it."""

    number: int
    """Place among all of them, the same on all processes."""

    name: str
    """The weight's name; of a tied one the first."""

    origin: Origin

    spec: ShardSpec | None
    """Which part of the whole weight this process has; None is all of it."""

    place: Place | None = None
    """In the arena; None has the source's own memory."""

    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def shape(self) -> torch.Size:
        """The shape of this process's part."""
        return self.origin.whole if self.spec is None else self.spec.shape(self.origin.whole)

    @property
    def num_bytes(self) -> int:
        """Bytes of this process's part."""
        return self.shape.numel() * self.origin.dtype.itemsize

    def show(self, weight: Tensor) -> None:
        """Have the modules hold `weight`."""
        param = nn.Parameter(weight, requires_grad=False)
        for module, leaf in self.places:
            setattr(module, leaf, param)

    def of(self, whole: Shaped[Tensor, "*S"]) -> Shaped[Tensor, "*P"]:
        """This process's part of the whole weight."""
        return whole if self.spec is None else self.spec.of(whole)


class InPlace:
    """The weights of a model that lies whole in this process, for `Replica.load`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def iter_gathered_units(self) -> Iterator[list[nn.Parameter]]:
        """All parameters as one unit: a model that is not sharded has nothing to gather."""
        yield list(self._model.parameters())


class Replica:
    """The model to generate with, made of a trained one.

    Args:
        trained: a causal language model, plain or with peft's adapters.
        shares: whether its weights stay where they are, whole, between the uses of an engine.
        tp_group: the processes that compute each layer together in generation.
        trained_by: those that do so in training.
        stages: those that train the other stages of the model, which have the same prompts.

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
        stages: Group = ALONE,
    ) -> None:
        plain = base_model(trained)
        self._plain = plain
        self.tp_group, self._trained_by, self._stages = tp_group, trained_by, stages
        settings = copy.deepcopy(plain.config)
        self.model = meta_model(lambda: _same_class(plain, settings))
        self.model.eval().requires_grad_(False)
        sharding = Sharding(self.model, tp_group)
        self._origins = Origins(plain, self.model, stages)
        self.device = next(plain.parameters()).device
        self._arena = Arena()
        self.slots = list(self._lay_out(sharding, shares=shares))
        sharding.apply()
        if stages.size > 1:
            mark_sharing(self.model, stages.apart)
        self._by_source: dict[nn.Parameter, list[Slot]] = {}
        for slot in self.slots:
            if slot.origin.source is not None:
                self._by_source.setdefault(slot.origin.source, []).append(slot)
        self._share_buffers()
        self.release()

    def _lay_out(self, sharding: Sharding, *, shares: bool) -> Iterator[Slot]:
        """The weights, each under all of its places."""
        slots: dict[tuple[object, ShardSpec | None], Slot] = {}
        for name, module, leaf, _ in places(self.model):
            origin = self._origins.of(name)
            spec = sharding.spec(name.rpartition(".")[0], leaf, origin.whole)
            key = origin.key, spec
            if key not in slots:
                slot = slots[key] = Slot(len(slots), name, origin, spec)
                if not (shares and origin.lies_as(spec)):
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
            self._arena.allocate(self.device)
            for slot in self.slots:
                slot.show(self._memory(slot))
        for stage in range(self._stages.size):
            if stage == self._stages.rank:
                self._take(weights)
            else:
                self._receive(stage)
        self._share_buffers()

    def _take(self, weights: HasTurns) -> None:
        """Copy the weights that this process trains, and send them to the other stages."""
        sends = self._stages.size > 1
        for params in weights.iter_gathered_units():
            slots = [slot for param in params for slot in self._by_source.get(param, ())]
            if sends and slots:
                self._announce([slot.number for slot in slots])
            for slot in slots:
                if slot.place is None and not sends:
                    continue
                if slot.origin.is_part(slot.spec) and not sends:
                    self._memory(slot).copy_(slot.origin.value())
                    continue
                full = slot.origin.whole_value(self._trained_by).to(slot.origin.dtype)
                if slot.place is not None:
                    self._memory(slot).copy_(slot.of(full))
                if sends:
                    self._stages.broadcast(full.contiguous(), source=self._stages.rank)
        if sends:
            self._announce([])

    def _receive(self, stage: int) -> None:
        """Receive the weights that another stage trains, in the order in which it sends them."""
        while numbers := self._announced(stage):
            for slot in (self.slots[number] for number in numbers):
                origin = slot.origin
                full = torch.empty(origin.whole, dtype=origin.dtype, device=self.device)
                self._stages.broadcast(full, source=stage)
                self._memory(slot).copy_(slot.of(full))

    def _announce(self, numbers: Sequence[int]) -> None:
        """Say which weights come next; none at the end."""
        header = torch.zeros(len(self.slots) + 1, dtype=torch.int64, device=self.device)
        header[: len(numbers) + 1] = torch.tensor([len(numbers), *numbers])
        self._stages.broadcast(header, source=self._stages.rank)

    def _announced(self, stage: int) -> list[int]:
        header = torch.zeros(len(self.slots) + 1, dtype=torch.int64, device=self.device)
        self._stages.broadcast(header, source=stage)
        count, *numbers = header.tolist()
        return numbers[:count]

    def _memory(self, slot: Slot) -> Tensor:
        if slot.place is None:
            return slot.origin.in_place
        return self._arena.at(slot.place).view(slot.origin.dtype).view(slot.shape)

    def _share_buffers(self) -> None:
        """Have the trained model's buffers: some families change theirs as they read."""
        for name, module in self.model.named_modules():
            for leaf, buffer in module.named_buffers(recurse=False):
                theirs = self._origins.buffer(name, leaf)
                theirs = buffer.to(self.device) if theirs is None else theirs
                setattr(module, leaf, theirs.to(buffer.dtype))

    def release(self) -> None:
        """Give the memory back; the weights read as NaN until they are loaded again."""
        self._arena.release()
        for slot in self.slots:
            dtype = slot.origin.dtype
            nothing = float("nan") if dtype.is_floating_point else 0
            slot.show(torch.full((), nothing, dtype=dtype, device=self.device).expand(slot.shape))

    def weights_hash(self) -> int:
        """A hash of the weights that generation reads, adapters merged: the same for any division.

        Its `tp_group` calls it in step.
        """
        sums = torch.stack([self._sum(slot, getattr(*slot.places[0])) for slot in self.slots])
        return hash_of_sums([slot.name for slot in self.slots], sum_(sums, self.tp_group))

    def _sum(self, slot: Slot, weight: Tensor) -> Int64[Tensor, ""]:
        """Sum over this process's part of a weight, without what an earlier peer has too."""
        if slot.spec is not None:
            parts = slot.spec.first_held(weight)
        else:
            parts = [(weight, 0)] if self.tp_group.rank == 0 else []
        none = torch.zeros((), dtype=torch.int64, device=weight.device)
        return sum((bits_sum(part, first=first) for part, first in parts), start=none)


def _same_class(plain: PreTrainedModel, settings: object) -> PreTrainedModel:
    return type(plain)._from_config(settings, dtype=plain.dtype)  # noqa: SLF001
