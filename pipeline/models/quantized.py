"""Frozen linear layers whose weights are stored in 4 or 8 bits (Dettmers et al. 2023, QLoRA).

The vectors of `block_codes` are the layer's parameters: they don't learn, and the engine lays them
out, shards, offloads and saves them as any frozen weight. A product takes the weight for as long as
it lasts; the backward pass computes it again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.config import FrozenModelConfig
from pipeline.engine.stored import ReadElements, StoredParameter, stored_like
from pipeline.engine.tensor_parts import Part
from pipeline.engine.units import ROOT, find_units
from pipeline.errors import ConfigError
from pipeline.models.block_codes import Form, Vector, pack, parts_of, unpack
from pipeline.models.code_parts import CodePart
from pipeline.models.cut_parameters import replace_by_part


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
