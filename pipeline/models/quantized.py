"""Frozen linear layers whose weights are stored in 4 or 8 bits (Dettmers et al. 2023, QLoRA).

The vectors of `block_codes` are the layer's parameters: they don't learn, and the engine lays them
out, shards, offloads and saves them as any frozen weight. A product takes the weight for as long as
it lasts; the backward pass computes it again.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.config import FrozenModelConfig
from pipeline.engine.stored import ReadElements, StoredParameter, stored_like
from pipeline.engine.tensor_parts import Part
from pipeline.engine.units import ROOT, find_units
from pipeline.models.block_codes import (
    BLOCK,
    GROUP,
    Form,
    Packed,
    Vector,
    pack,
    parts_of,
    scaled,
    scales_of,
    unpack,
)
from pipeline.models.deferred import replace_by_part
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.system.errors import ConfigError


@dataclass(frozen=True)
class CodePart:
    """A part of a weight, in codes.

    Raises:
        ConfigError: `name`, the weight, can't be cut so.
    """

    part: Part
    """The part of the weight that this process has."""

    form: Form
    name: str

    def __post_init__(self) -> None:
        if self.part.whole.numel() % BLOCK:
            raise self._refused(f"whose last block of {BLOCK} is not full", "take quantize none")
        if self.run % parts_of(self.form)["codes"].grain:
            raise self._refused(
                "between two weights that share a byte", "take int8, or another parallel.tp"
            )

    def _refused(self, reason: str, fix: str) -> ConfigError:
        shape = " x ".join(map(str, self.part.whole))
        return ConfigError(
            f"parallel.tp {len(self.part.specs)} would cut the {self.form.codes} codes of"
            f" {self.name} ({shape}) {reason}; {fix}"
        )

    @property
    def shape(self) -> torch.Size:
        """Of the part."""
        return self.part.own.shape(self.part.whole)

    @property
    def run(self) -> int:
        """Weights that lie in one block, and follow each other in every process's part."""
        inner, dim = self.part.inner, self.part.own.dim
        shards = [shard for spec in self.part.specs for shard in spec.shards]
        borders = [inner * border for each in shards for border in (each.start, each.stop)]
        return math.gcd(BLOCK, inner * self.part.whole[dim], *borders)

    def of(self, vector: str) -> Part | None:
        """What a process has of a vector; None is all of it."""
        stored = parts_of(self.form)[vector]
        if stored.grain > BLOCK:
            return None
        found = self._scales if stored.grain == BLOCK else self.part.in_blocks(stored.grain)
        if found is None:
            return None
        numel = stored.numel(self.part.whole.numel())
        return replace(found, stored=torch.Size((numel,)))

    @cached_property
    def _scales(self) -> Part | None:
        """What a process has of scales: those of all blocks in which it has weights.

        None where that is left at all of them: blocks are parts of several rows, or of several
        stretches of a process.
        """
        whole = self.part.in_blocks(BLOCK)
        if whole is not None:
            return whole
        rows, inner = self.part.whole[: self.part.own.dim].numel(), self.part.inner
        stride = self.part.whole[self.part.own.dim] * inner
        shards = [shard for spec in self.part.specs for shard in spec.shards]
        is_plain = len(shards) == len(self.part.specs) and all(each.copies == 1 for each in shards)
        if not is_plain or (rows > 1 and stride % BLOCK):
            return None
        specs, held = list[ShardSpec](), 0
        for each in shards:
            first, last = each.start * inner // BLOCK, -(-each.stop * inner // BLOCK)
            own = [Shard(max(first, held), last)]
            if first < held:  # the process before has weights of that block too
                own.insert(0, Shard(first, held, counts=False))
            specs.append(ShardSpec(1, tuple(shard for shard in own if shard.size)))
            held = last
        return Part(torch.Size((rows, stride // BLOCK)), tuple(specs), self.part.rank)

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """The part of the weight that `packed` stands for, to the bits of the whole one's."""
        codes, own = packed["codes"], self._scales
        groups = None
        if self.form.double and own is not None:
            groups = _numbers(own, codes.device).view(-1) // GROUP
        scales = scales_of(packed, self.form, groups)
        if self.run < BLOCK:
            scales = scales[self._places(codes.device)]
        return scaled(codes, scales, self.shape, self.form, dtype)

    def _places(self, device: torch.device) -> Int64[Tensor, " n"]:
        """Of each run of the part, where the scale of its block is among those that are here."""
        in_runs = self.part.in_blocks(self.run)
        assert in_runs is not None
        blocks = _numbers(in_runs, device) // (BLOCK // self.run)
        if self._scales is None:
            return blocks.view(-1)
        (first, *_), (rows, stride) = self._scales.own.shards, self._scales.whole
        row = torch.arange(rows, device=device)[:, None]
        width = self._scales.own.shape(self._scales.whole)[1]
        return (blocks - row * stride - first.start + row * width).view(-1)


def _numbers(part: Part, device: torch.device) -> Int64[Tensor, "rows n"]:
    """Those that the elements of a part have in the whole."""
    rows, stride = part.whole
    own = [torch.arange(each.start, each.stop, device=device) for each in part.own.shards]
    return torch.arange(rows, device=device)[:, None] * stride + torch.cat(own)


class QuantizedLinear(nn.Module):
    """A frozen `nn.Linear`, or a `Conv1D` of GPT-2, that keeps `pack`'s vectors of its weight.

    Args:
        layer: of which it takes the bias, and the numbers of the weight.
        form: how weights are stored.
        device: where the vectors go; None leaves them where the weight is.
        lazy: whether a weight that is still in a file stays there until an engine reads its piece.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        layer: nn.Linear | Conv1D,
        form: Form,
        *,
        device: torch.device | None = None,
        lazy: bool = False,
    ) -> None:
        super().__init__()
        weight = layer.weight
        self.form, self.shape, self.dtype = form, weight.shape, weight.dtype
        self.transposed = isinstance(layer, Conv1D)
        self._own: CodePart | None = None
        for name, vector in _parameters(weight, form, device or weight.device, lazy=lazy).items():
            self.register_parameter(name, vector)
        self.bias = cast("nn.Parameter | None", layer.bias)

    @property
    def weight(self) -> Float[Tensor, "rows columns"]:
        """What the layer multiplies with now, rounded to its number format."""
        return self.dequantized(self.dtype)

    @property
    def part(self) -> Part | None:
        """What the weight is a part of, where several processes compute with it."""
        return None if self._own is None else self._own.part

    @property
    def in_features(self) -> int:
        """Of this process's part."""
        return self.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        """Of this process's part."""
        return self.shape[1 if self.transposed else 0]

    @property
    def whole_shape(self) -> torch.Size:
        """Of the weight of which this process may have a part."""
        return self.shape if self.part is None else self.part.whole

    @property
    def num_bytes(self) -> int:
        """Of this process's part of the weight, where it is not in codes."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def whole_bytes(self) -> int:
        """Of the weight, where it is neither in codes nor cut."""
        return self.whole_shape.numel() * self.dtype.itemsize

    def cut(self, part: Part, *, name: str) -> None:
        """Leave this process's part, of codes and scales that are those of the whole weight.

        Raises:
            ConfigError: codes of the weight, which is called `name`, can't be cut so.
        """
        own = CodePart(part, self.form, name)
        for vector in parts_of(self.form):
            of_vector = own.of(vector)
            if of_vector is not None:
                replace_by_part(self, vector, of_vector)
        self._own, self.shape = own, own.shape

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "rows columns"]:
        """The weight, computed in fp32 and rounded once to `dtype`."""
        packed = {name: self.get_parameter(name) for name in parts_of(self.form)}
        if self._own is not None:
            return self._own.unpack(packed, dtype)
        return unpack(packed, self.shape, self.form, dtype)

    def forward(self, x: Float[Tensor, "*B inputs"]) -> Float[Tensor, "*B outputs"]:
        """The product of the layer that it stands for, bit for bit."""
        return _Product.apply(x, self, self.bias)

    def product(self, x: Float[Tensor, "*B inputs"]) -> Float[Tensor, "*B outputs"]:
        """The same without its bias."""
        return _Product.apply(x, self, None)

    def extra_repr(self) -> str:
        """As `nn.Linear` describes itself, and the form."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.form}"


class _Product(torch.autograd.Function):
    """x W^T + b, of which nothing is kept: W is unpacked again for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.layer = layer
        weight = layer.weight
        return F.linear(x, weight.T if layer.transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:  # noqa: ANN401
        if not ctx.needs_input_grad[0]:
            return None, None, None
        weight = ctx.layer.weight
        return grads[0] @ (weight.T if ctx.layer.transposed else weight), None, None


LinearLayer = nn.Linear | Conv1D | QuantizedLinear
"""What a layer that processes compute together may be."""


def weight_shape(layer: LinearLayer) -> torch.Size:
    """Of this process's part of a layer's weight, however it is stored."""
    return layer.shape if isinstance(layer, QuantizedLinear) else layer.weight.shape


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer has its weight as (inputs, outputs)."""
    return layer.transposed if isinstance(layer, QuantizedLinear) else isinstance(layer, Conv1D)


def quantized(
    model: nn.Module,
    config: FrozenModelConfig,
    *,
    device: torch.device | None = None,
    lazy: bool = False,
) -> nn.Module:
    """`model`, the frozen linear weights of its blocks replaced as the settings ask.

    Adapters, biases, norms, embeddings and heads stay as they are; so does a weight that lies in
    two layers, and one that is not a layer's own, as those of a mixture's experts. `device` and
    `lazy` are those of `QuantizedLinear`.

    Raises:
        ConfigError: its blocks have no linear layer.
    """
    if config.quantize == "none":
        return model
    form = Form(config.quantize, double=config.double_quant)
    if not quantize_layers(model, form, device=device, lazy=lazy):
        raise ConfigError(
            f"quantize {config.quantize}: the blocks of {config.path} have no linear layer of"
            " their own to quantize; set quantize none"
        )
    return model


def quantize_layers(
    model: nn.Module, form: Form, *, device: torch.device | None = None, lazy: bool = False
) -> int:
    """Replace the linear layers of the blocks, one by one, and return how many there are."""
    layers = list(_layers(model))
    for module, name, layer in layers:
        setattr(module, name, QuantizedLinear(layer, form, device=device, lazy=lazy))
        layer.register_parameter("weight", None)  # `layers` shall not keep what it stands for
    return len(layers)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """By their names in the model."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def num_weights(model: nn.Module) -> int:
    """Numbers in the model's weights, however they are stored; tied ones once."""
    layers = quantized_layers(model).values()
    packed = {id(layer.get_parameter(name)) for layer in layers for name in parts_of(layer.form)}
    plain = sum(param.numel() for param in model.parameters() if id(param) not in packed)
    return plain + sum(layer.shape.numel() for layer in layers)


def parts_bytes(layer: QuantizedLinear) -> int:
    """Of the vectors that stand for the layer's weight."""
    return sum(layer.get_parameter(name).nbytes for name in parts_of(layer.form))


def dequantized_weights(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Named weights, with those of quantized layers as the plain layer has them, in fp32.

    `weights` are in place, all of a layer together, while one of them is its turn.
    """
    layers = quantized_layers(model)
    for name, tensor in weights:
        owner, _, leaf = name.rpartition(".")
        if owner not in layers or leaf == "bias":
            yield name, tensor
        elif leaf == "codes":
            yield f"{owner}.weight", layers[owner].dequantized()


def rounded_weights(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """What `dequantized_weights` gave, adapters merged, in the number formats of the layers."""
    formats = {
        f"{name.removesuffix('.base_layer')}.weight": layer.dtype
        for name, layer in quantized_layers(model).items()
    }
    for name, tensor in weights:
        yield name, tensor.to(formats.get(name, tensor.dtype))


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """What is to be replaced: the module that holds it, and its name there."""
    uses = Counter(
        param for module in model.modules() for param in module.parameters(recurse=False)
    )
    for unit in find_units(model):
        if unit.name == ROOT:
            continue
        trained = {
            id(inner)
            for module in unit.module.modules()
            if isinstance(module, AuxiliaryTrainingWrapper)
            for inner in module.modules()
        }
        for module in unit.module.modules():
            for name, child in module.named_children():
                is_linear = isinstance(child, nn.Linear | Conv1D)
                if not is_linear or id(child) in trained or child.weight.requires_grad:
                    continue
                if uses[cast("nn.Parameter", child.weight)] == 1:
                    yield module, name, child


def _parameters(
    weight: Tensor, form: Form, device: torch.device, *, lazy: bool
) -> dict[str, nn.Parameter]:
    numel, vectors = weight.numel(), parts_of(form)
    if not isinstance(weight, StoredParameter):
        packed = pack(weight.detach().to(device), form)
    elif not lazy:
        packed = pack(weight.read(0, numel).to(device), form)
    else:
        return {
            name: stored_like(
                torch.empty(vector.numel(numel), dtype=vector.dtype, device="meta"),
                partial(_read, name, vector, form, weight.read, numel),
                device,
            )
            for name, vector in vectors.items()
        }
    return {name: nn.Parameter(each, requires_grad=False) for name, each in packed.items()}


def _read(
    name: str, vector: Vector, form: Form, read: ReadElements, numel: int, start: int, stop: int
) -> Tensor:
    """Elements `start` to `stop` of one of the vectors of a weight of `numel` numbers in a file."""
    begin, end, first = vector.stretch(start, stop)
    packed = pack(read(begin, min(end, numel)), form)[name]
    return packed[start - first : stop - first]
