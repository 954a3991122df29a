"""The replica: a second set of modules of the trained model's class, for generation.

It has the same adapters and quantized layers. It shares weights that the trained model stores
unsharded; others are copied, one unit at a time, from the weights that an engine gathers. Weights
that another pipeline stage trains are received from it. The replica has no hooks or autograd, so a
process can generate without the others.
"""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Int64, Shaped
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.tensor_parallel import Sharding, all_reduce_, set_sharing_group
from pipeline.engine.sharding.tensor_parallel import ParamShard, full_shape, get_shard
from pipeline.models.adapters.lora import merged_weights, suppress_peft_warnings
from pipeline.models.adapters.quantized import CODES, QuantizedLinear, quantize_layers
from pipeline.models.forward.forward import base_model, set_fp32_logits
from pipeline.models.forward.vocab_parallel import FP32_LOGITS
from pipeline.models.hf.export import GathersUnits
from pipeline.models.hf.meta import build_on_meta, iter_parameters
from pipeline.parallel.group import SELF_GROUP, Group
from pipeline.parallel.shards import ShardSpec

HASH_BITS = 52
"""Number of bits in a hash, few enough for JSON numbers to represent it exactly."""

WORD_BYTES = 8
"""Size in bytes of the words whose sum is hashed."""


@dataclass(frozen=True)
class WeightSource:
    """The trained parameter from which a weight of the replica is made."""

    key: object
    """A key that is the same for all names of a tied weight and differs between weights."""

    full_shape: torch.Size
    """Shape of the full weight, of which this process may train a shard."""

    dtype: torch.dtype

    parameter: nn.Parameter | None
    """The trained weight, or the codes of a quantized one; None if another stage trains it."""

    layer: QuantizedLinear | None = None
    """The layer of a quantized weight that the replica needs dequantized."""

    part: ParamShard | None = None
    """The shard that this process trains, if layers are sharded in training."""

    @property
    def detached(self) -> Tensor:
        """The trained parameter, detached from autograd but not copied."""
        assert self.parameter is not None
        return self.parameter.detach()

    def is_local_shard(self, spec: ShardSpec | None) -> bool:
        """Return whether this process trains this shard, or the full weight if `spec` is None."""
        local = None if self.part is None else self.part.spec
        return self.parameter is not None and spec == local

    def value(self) -> Shaped[Tensor, "*S"]:
        """Return the shard that this process trains."""
        return self.detached if self.layer is None else self.layer.weight

    def full_value(self, trained_by: Group) -> Shaped[Tensor, "*S"]:
        """Return the full weight; all processes that train its shards must call this."""
        local = self.value()
        if self.part is None:
            return local
        return self.part.join(trained_by.all_gather(local, label="weights to generate with"))


class WeightSources:
    """The sources of all weights of a replica.

    Args:
        trained: the base model inside the adapters, or this process's stage of it.
        replica: the full model, on the meta device.
        stages: the processes that train the model's stages; all of them must create this object.
    """

    def __init__(self, trained: PreTrainedModel, replica: PreTrainedModel, stages: Group) -> None:
        self._trained = trained
        self.by_name = dict(self._local_sources(replica))
        """Sources by the names of the replica's weights."""
        self._buffers: dict[str, Tensor] = {}
        if stages.size > 1:
            self.by_name = dict(_merge_stages(self.by_name, replica, stages))
            saved = trained.state_dict()  # buffers that files contain; most models have none
            local = {name: b.cpu() for name, b in trained.named_buffers() if name in saved}
            for buffers in stages.gather_objects(local):
                self._buffers |= buffers

    def buffer(self, module: str, leaf: str) -> Tensor | None:
        """Return the trained buffer, or None if neither this stage nor the model files have it."""
        try:
            return self._trained.get_submodule(module).get_buffer(leaf)
        except AttributeError:
            saved = self._buffers.get(f"{module}.{leaf}")
            return None if saved is None else saved.to(next(self._trained.parameters()).device)

    def _local_sources(self, replica: PreTrainedModel) -> Iterator[tuple[str, WeightSource]]:
        """Yield the sources of the weights that this process trains."""
        for name, _, leaf, _ in iter_parameters(replica):
            try:
                module = self._trained.get_submodule(name.rpartition(".")[0])
                layer = module if isinstance(module, QuantizedLinear) and leaf == "weight" else None
                parameter = module.get_parameter(leaf if layer is None else CODES)
            except AttributeError:  # it is on another pipeline stage
                continue
            shape = full_shape(parameter) if layer is None else layer.shape
            dtype = parameter.dtype if layer is None else layer.dtype
            part = get_shard(parameter)
            yield name, WeightSource(id(parameter), shape, dtype, parameter, layer, part)


def _merge_stages(
    local: dict[str, WeightSource], replica: PreTrainedModel, stages: Group
) -> Iterator[tuple[str, WeightSource]]:
    """Yield each weight's name with its source, from the first stage that trains it."""
    tied: dict[nn.Parameter, list[str]] = {}
    for name, _, _, param in iter_parameters(replica):
        tied.setdefault(param, []).append(name)
    metadata = stages.gather_objects({name: (s.full_shape, s.dtype) for name, s in local.items()})
    for names in tied.values():
        rank, key = next(
            (rank, name) for rank, owned in enumerate(metadata) for name in names if name in owned
        )
        shape, dtype = metadata[rank][key]
        source = local[key] if rank == stages.rank else WeightSource(key, shape, dtype, None)
        for name in names:
            yield name, source


def _build_like(trained: nn.Module, *, tp_size: int) -> PreTrainedModel:
    """Build a model on the meta device, of the same class and with the same adapters as `trained`.

    Layers are quantized like those of `trained`, unless they are sharded over processes.
    """
    plain = base_model(trained)
    config, model_class = copy.deepcopy(plain.config), type(plain)
    model = build_on_meta(lambda: model_class._from_config(config, dtype=plain.dtype))  # noqa: SLF001
    if isinstance(trained, PeftModel):
        with torch.device("meta"), suppress_peft_warnings():
            get_peft_model(model, copy.deepcopy(trained.peft_config["default"]))
    layer = next((layer for layer in plain.modules() if isinstance(layer, QuantizedLinear)), None)
    if layer is not None and tp_size == 1:
        quantize_layers(model, layer.scheme)
    return model.eval().requires_grad_(False)


@dataclass
class ReplicaWeight:
    """One weight of the replica."""

    index: int
    """Index of the weight, the same on all processes."""

    source: WeightSource

    spec: ShardSpec | None
    """The shard of the full weight on this process; None for the full weight."""

    is_copied: bool
    """Whether the weight has its own memory instead of sharing that of the trained weight."""

    locations: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Modules that use the weight, and the names of their parameters."""

    memory: Tensor | None = None
    """Memory of the copy, while the replica is loaded."""

    @property
    def shape(self) -> torch.Size:
        """The shape of this process's shard."""
        full = self.source.full_shape
        return full if self.spec is None else self.spec.shape(full)

    @property
    def value(self) -> Tensor:
        """This process's shard, in the memory that generation uses."""
        return self.source.detached if self.memory is None else self.memory

    def set_parameters(self, weight: Tensor) -> None:
        """Set the modules' parameters to `weight`."""
        param = nn.Parameter(weight, requires_grad=False)
        for module, leaf in self.locations:
            setattr(module, leaf, param)

    def shard(self, full: Shaped[Tensor, "*S"]) -> Shaped[Tensor, "*P"]:
        """Return this process's shard of the full weight."""
        return full if self.spec is None else self.spec.extract(full)


class Replica:
    """The model to generate with, made from a trained one.

    Args:
        trained: a causal language model, plain or with PEFT adapters.
        shares: whether the trained weights stay complete and in place between engine steps.
        tp_group: the tensor-parallel group of generation.
        trained_by: the tensor-parallel group of training.
        stages: the processes of all pipeline stages, which have the same prompts.

    Raises:
        ConfigError: the model can't be sharded over this number of processes.
    """

    def __init__(
        self,
        trained: nn.Module,
        *,
        shares: bool,
        tp_group: Group = SELF_GROUP,
        trained_by: Group = SELF_GROUP,
        stages: Group = SELF_GROUP,
    ) -> None:
        plain = base_model(trained)
        self.tp_group, self._trained_by, self._stages = tp_group, trained_by, stages
        self.model = _build_like(trained, tp_size=tp_group.size)
        sharding = Sharding(self.model, tp_group)
        self._sources = WeightSources(plain, self.model, stages)
        self.device = next(plain.parameters()).device
        self.loaded = False
        """Whether the weights for generation are loaded."""
        self._specs: dict[str, ShardSpec | None] = {}
        self.weights = list(self._create_weights(sharding, shares=shares))
        sharding.apply()
        if any(stages.gather_objects(hasattr(plain.get_output_embeddings(), FP32_LOGITS))):
            set_fp32_logits(self.model)
        if stages.size > 1:
            set_sharing_group(self.model, stages.untracked)
        self._by_parameter: dict[nn.Parameter, list[ReplicaWeight]] = {}
        for weight in self.weights:
            if weight.source.parameter is not None:
                self._by_parameter.setdefault(weight.source.parameter, []).append(weight)
        self._share_buffers()
        self.release()

    def _create_weights(self, sharding: Sharding, *, shares: bool) -> Iterator[ReplicaWeight]:
        """Yield the weights, each with all of its locations in the modules."""
        weights: dict[tuple[object, ShardSpec | None], ReplicaWeight] = {}
        for name, module, leaf, _ in iter_parameters(self.model):
            source = self._sources.by_name[name]
            spec = sharding.spec(name.rpartition(".")[0], leaf, source.full_shape)
            key = source.key, spec
            if key not in weights:
                is_shared = shares and source.layer is None and source.is_local_shard(spec)
                weights[key] = ReplicaWeight(len(weights), source, spec, not is_shared)
                yield weights[key]
            weights[key].locations.append((module, leaf))
            self._specs[name] = spec

    @property
    def shares(self) -> bool:
        """Whether the replica shares any weight with the trained model."""
        return not all(weight.is_copied for weight in self.weights)

    @torch.no_grad()
    def load(self, engine: GathersUnits) -> None:
        """Copy an engine's trained weights, one unit at a time; all processes must call this."""
        if not self.loaded:
            for weight in self.weights:
                if weight.is_copied:
                    weight.memory = torch.empty(
                        weight.shape, dtype=weight.source.dtype, device=self.device
                    )
                weight.set_parameters(weight.value)
            self.loaded = True
        for stage in range(self._stages.size):
            if stage == self._stages.rank:
                self._copy_and_send(engine)
            else:
                self._receive(stage)
        self._share_buffers()

    def _copy_and_send(self, engine: GathersUnits) -> None:
        """Copy the weights that this process trains, and send them to the other stages."""
        sends = self._stages.size > 1
        for params in engine.iter_gathered_units():
            weights = [weight for param in params for weight in self._by_parameter.get(param, ())]
            if sends and weights:
                self._stages.gather_objects([weight.index for weight in weights])
            for weight in weights:
                if weight.source.is_local_shard(weight.spec) and not sends:
                    if weight.is_copied:
                        weight.value.copy_(weight.source.value())
                    continue
                full = weight.source.full_value(self._trained_by)
                if weight.is_copied:
                    weight.value.copy_(weight.shard(full))
                if sends:
                    self._stages.broadcast(full.contiguous(), source=self._stages.rank)
        if sends:
            self._stages.gather_objects([])

    def _receive(self, stage: int) -> None:
        """Receive the weights that another stage trains, in the order in which it sends them."""
        while indices := self._stages.gather_objects(list[int]())[stage]:
            for weight in (self.weights[index] for index in indices):
                source = weight.source
                full = torch.empty(source.full_shape, dtype=source.dtype, device=self.device)
                self._stages.broadcast(full, source=stage)
                weight.value.copy_(weight.shard(full))

    def _share_buffers(self) -> None:
        """Use the trained model's buffers, which some models change in forward passes."""
        for name, module in self.model.named_modules():
            for leaf, buffer in module.named_buffers(recurse=False):
                trained = self._sources.buffer(name, leaf)
                trained = buffer.to(self.device) if trained is None else trained
                setattr(module, leaf, trained.to(buffer.dtype))

    def release(self) -> None:
        """Free the copies; until the weights are loaded again, they are NaN (integers are 0)."""
        self.loaded = False
        for weight in self.weights:
            weight.memory = None
            dtype = weight.source.dtype
            fill = float("nan") if dtype.is_floating_point else 0
            value = torch.full((), fill, dtype=dtype, device=self.device)
            weight.set_parameters(value.expand(weight.shape))

    def weights_hash(self) -> int:
        """Hash the merged weights, however sharded; all processes of `tp_group` must call this."""
        merged = iter_merged(self.model)
        sums = {name: self._sum_bits(value, self._specs[key]) for key, name, value in merged}
        return combine_sums([*sums], all_reduce_(torch.stack([*sums.values()]), self.tp_group))

    def _sum_bits(self, shard: Tensor, spec: ShardSpec | None) -> Int64[Tensor, ""]:
        """Sum the bits of this process's shard, except elements that a lower rank also holds."""
        if spec is not None:
            parts = spec.first_copies(shard)
        else:
            parts = [(shard, 0)] if self.tp_group.rank == 0 else []
        zero = torch.zeros((), dtype=torch.int64, device=shard.device)
        return sum((sum_bits(part, first=first) for part, first in parts), start=zero)


def iter_merged(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, name in an export, merged weight), once per tied weight, by its first name."""
    names: dict[tuple[nn.Parameter, bool], str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):  # adapters untie layers
        names.setdefault((param, ".base_layer." in name), name)
    weights = ((name, param.detach()) for (param, _), name in names.items())
    merges = any(isinstance(module, (LoraLayer, QuantizedLinear)) for module in model.modules())
    return merged_weights(model, weights) if merges else ((n, n, weight) for n, weight in weights)


def weights_hash(model: nn.Module) -> int:
    """Hash the merged weights of a model.

    The bits of each weight are read as 64-bit words, row by row, and added modulo 2^64, so the sum
    doesn't depend on the weight's sharding or the summation order. The sums are then mixed with the
    weights' names. This is as fast as reading the memory, but not a cryptographic hash.
    """
    sums = {name: sum_bits(weight) for _, name, weight in iter_merged(model)}
    return combine_sums([*sums], torch.stack([*sums.values()]))


def sum_bits(weight: Shaped[Tensor, "*S"], *, first: int = 0) -> Int64[Tensor, ""]:
    """Return the sum of a weight's words, read as signed integers, modulo 2^64.

    Each row of the last dimension is padded with zeros to complete words. For a shard, `first` is
    the index in the full rows at which its rows begin.
    """
    weight = weight.detach()
    if weight.ndim == 0:
        weight = weight[None]
    per_word = WORD_BYTES // weight.element_size()
    before = first % per_word
    after = -(before + weight.shape[-1]) % per_word
    is_aligned = weight.is_contiguous() and weight.storage_offset() % per_word == 0
    if before or after or not is_aligned:
        weight = F.pad(weight, (before, after)).contiguous()
    return weight.view(torch.int64).sum()


def combine_sums(names: Sequence[str], sums: Int64[Tensor, " n"]) -> int:
    """Return the hash, below 2^52, of weights with these names and these `sum_bits`."""
    total = sum(_factor(name) * value for name, value in zip(names, sums.tolist(), strict=True))
    return total % 2**64 >> (64 - HASH_BITS)


def _factor(name: str) -> int:
    """Return an odd 64-bit factor, so that a change of any bit of the sum changes the product."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
