"""Frozen linear layers whose weights are stored in 4 or 8 bits (Dettmers et al. 2023, QLoRA).

Weights are stored in blocks of 64 values, each block with a scale. NF4 follows section 3 and
appendix E: the 16 codes are quantiles of a normal distribution, and a weight is its code times the
largest magnitude of its block. int8 has 255 equal steps instead. A flattened weight is split into
blocks in order; the last one is padded with zeros. With `double` the scales themselves are stored
in 8 bits, in groups of 256: 255 equal steps between the smallest and the largest of a group. QLoRA
subtracts the mean of the full matrix instead, which a process with a shard does not have.

The vectors of codes and scales are the layer's parameters: they are frozen, and the engine lays
them out, shards, offloads and saves them like any frozen weight. The forward pass dequantizes the
weight temporarily; the backward pass does so again.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.config import FrozenModelConfig
from pipeline.engine.sharding.tensor_parallel import Part, replace_by_part
from pipeline.engine.sharding.units import ROOT, find_units
from pipeline.system.errors import ConfigError

BLOCK = 64
"""Weights that share a scale."""

GROUP = 256
"""Scales that share a range, if they are quantized as well."""

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Values of the 4-bit codes 0 to 15 (QLoRA, appendix E)."""

INT8_STEPS = 127
"""Steps of an 8-bit code on either side of zero."""

AT_ONCE = 2**20
"""Weights that are packed or unpacked at once, a multiple of the block."""

Packed = Mapping[str, Tensor]
"""The flat vectors of a quantized weight, by name."""


@dataclass(frozen=True)
class Form:
    """Format in which weights are stored."""

    codes: Literal["nf4", "int8"]
    double: bool = False
    """Whether scales are quantized too."""


@dataclass(frozen=True)
class Vector:
    """One of the vectors of a quantized weight."""

    dtype: torch.dtype

    weights: int
    """Weights per block."""

    per_block: int
    """Number of elements of the vector per block."""

    @property
    def grain(self) -> int:
        """Weights per element of the vector."""
        return self.weights // self.per_block

    def numel(self, weights: int) -> int:
        """Number of elements for a number of weights."""
        return -(-weights // self.weights) * self.per_block


def parts_of(form: Form) -> dict[str, Vector]:
    """The vectors of a weight, by name."""
    of_codes = {
        "nf4": Vector(torch.uint8, BLOCK, BLOCK // 2),
        "int8": Vector(torch.int8, BLOCK, BLOCK),
    }
    parts = {"codes": of_codes[form.codes]}
    if not form.double:
        return parts | {"scales": Vector(torch.float32, BLOCK, 1)}
    return parts | {
        "scale_codes": Vector(torch.uint8, BLOCK, 1),
        "scale_ranges": Vector(torch.float32, BLOCK * GROUP, 2),
    }


def pack(weight: Float[Tensor, "*S"], form: Form) -> dict[str, Tensor]:
    """The vectors of a quantized `weight`, on its device; equal on all devices.

    Codes are rounded to nearest; ties go to the lower code in NF4 and to the even one in int8.
    """
    flat = weight.detach().reshape(-1)
    packed = {
        name: torch.empty(part.numel(len(flat)), dtype=part.dtype, device=flat.device)
        for name, part in parts_of(form).items()
    }
    if flat.is_meta:
        return packed
    scales = torch.empty(-(-len(flat) // BLOCK), device=flat.device)
    per_weight = parts_of(form)["codes"].grain
    for start in range(0, len(flat), AT_ONCE):
        piece = flat[start : start + AT_ONCE].float()
        blocks = F.pad(piece, (0, -len(piece) % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        scales[start // BLOCK :][: len(largest)] = largest
        normalized = blocks / torch.where(largest > 0, largest, 1.0)[:, None]
        codes = _nf4_codes(normalized) if form.codes == "nf4" else _int8_codes(normalized)
        packed["codes"][start // per_weight :][: len(codes)] = codes
    if not form.double:
        return packed | {"scales": scales}
    codes, ranges = _pack_scales(scales)
    return packed | {"scale_codes": codes, "scale_ranges": ranges}


def unpack(
    packed: Packed,
    shape: torch.Size,
    form: Form,
    dtype: torch.dtype,
    blocks: Int64[Tensor, " n"] | None = None,
) -> Tensor:
    """The dequantized weight of `shape`, computed in fp32 and rounded once.

    For a shard, `blocks` are the indices of its blocks in the full weight.
    """
    codes, scales = packed["codes"], _unpack_scales(packed, form, blocks)
    if form.codes == "int8":
        scales = scales / INT8_STEPS
    per_weight = parts_of(form)["codes"].grain
    flat = torch.empty(len(codes) * per_weight, dtype=dtype, device=codes.device)
    for start in range(0, len(flat), AT_ONCE):
        stop = min(start + AT_ONCE, len(flat))
        piece = codes[start // per_weight : stop // per_weight]
        if form.codes == "nf4":
            pairs = torch.index_select(_pairs(codes.device), 0, piece.int())
            numbers = pairs.view(torch.float32)
        else:
            numbers = piece.float()
        by_block = numbers.view(-1, BLOCK)
        by_block *= scales[start // BLOCK : stop // BLOCK, None]
        flat[start:stop] = by_block.view(-1)
    return flat[: shape.numel()].view(shape)


def _nf4_codes(normalized: Float[Tensor, "blocks size"]) -> Shaped[Tensor, " n"]:
    """Two codes per byte, the first in the high half."""
    levels = torch.tensor(NF4)
    codes = torch.zeros_like(normalized, dtype=torch.uint8)
    for middle in ((levels[1:] + levels[:-1]) / 2).tolist():  # several times faster than bucketize
        codes += normalized > middle
    return (codes[:, ::2] * 16 + codes[:, 1::2]).view(-1)


def _int8_codes(normalized: Float[Tensor, "blocks size"]) -> Shaped[Tensor, " n"]:
    return (normalized * INT8_STEPS).round_().to(torch.int8).view(-1)


@functools.lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Int64[Tensor, " 256"]:
    """The two fp32 values of each byte as one element, for a faster lookup."""
    levels = torch.tensor(NF4, device=device)
    both = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    return both.view(torch.int64).view(-1)


def _pack_scales(scales: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """Codes of the scales, and the minimum and step of each group."""
    missing = -len(scales) % GROUP
    groups = torch.cat([scales, scales[-1:].expand(missing)]).view(-1, GROUP)
    low, high = groups.aminmax(dim=1)
    step = (high - low) / 255
    codes = (groups - low[:, None]) / torch.where(step > 0, step, 1.0)[:, None]
    ranges = torch.stack([low, step], dim=1).view(-1)
    return codes.round_().to(torch.uint8).view(-1)[: len(scales)], ranges


def _unpack_scales(
    packed: Packed, form: Form, blocks: Int64[Tensor, " n"] | None
) -> Float[Tensor, " n"]:
    """The scale of each block, in fp32."""
    if not form.double:
        return packed["scales"]
    codes, ranges = packed["scale_codes"], packed["scale_ranges"].view(-1, 2)
    if blocks is None:
        blocks = torch.arange(len(codes), device=codes.device)
    low, step = ranges[blocks // GROUP].unbind(1)
    return low + codes * step


class QuantizedLinear(nn.Module):
    """A frozen `nn.Linear`, or GPT-2's `Conv1D`, that stores its weight as the vectors of `pack`.

    Args:
        layer: provides the bias and the weight.
        form: storage format.
        device: device of the vectors; None keeps the weight's device.
    """

    bias: nn.Parameter | None

    def __init__(
        self, layer: nn.Linear | Conv1D, form: Form, *, device: torch.device | None = None
    ) -> None:
        super().__init__()
        weight = layer.weight
        self.form, self.shape, self.dtype = form, weight.shape, weight.dtype
        self.transposed = isinstance(layer, Conv1D)
        self.part: Part | None = None
        """The part of the weight that this process has, under tensor parallelism."""
        for name, vector in pack(weight.detach().to(device or weight.device), form).items():
            self.register_parameter(name, nn.Parameter(vector, requires_grad=False))
        self.bias = cast("nn.Parameter | None", layer.bias)

    @property
    def weight(self) -> Float[Tensor, "rows columns"]:
        """Return the dequantized weight, rounded to the layer's data type."""
        return self.dequantized(self.dtype)

    @property
    def in_features(self) -> int:
        """Input size of this process's shard."""
        return self.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        """Output size of this process's shard."""
        return self.shape[1 if self.transposed else 0]

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the full weight, of which this process may have a shard."""
        return self.shape if self.part is None else self.part.whole

    def cut(self, part: Part, *, name: str) -> None:
        """Keep this process's shard; blocks and their scales are those of the full weight.

        Raises:
            ConfigError: the shard of `name`, the weight, does not consist of full blocks.
        """
        if part.whole.numel() % BLOCK or part.in_blocks(BLOCK) is None:
            shape = " x ".join(map(str, part.whole))
            raise ConfigError(
                f"quantize {self.form.codes} stores blocks of {BLOCK} weights, and parallel.tp"
                f" {len(part.specs)} would split blocks of {name} ({shape}); use another"
                " parallel.tp, or quantize none"
            )
        for vector, stored in parts_of(self.form).items():
            own = part.in_blocks(stored.grain) if stored.grain <= BLOCK else None
            if own is not None:  # coarser vectors stay full
                numel = stored.numel(part.whole.numel())
                replace_by_part(self, vector, replace(own, stored=torch.Size((numel,))))
        self.part, self.shape = part, part.own.shape(part.whole)

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "rows columns"]:
        """The weight, computed in fp32 and rounded once to `dtype`."""
        packed = {name: self.get_parameter(name) for name in parts_of(self.form)}
        blocks = None
        if self.part is not None and self.form.double:
            blocks = _block_numbers(self.part, packed["codes"].device)
        return unpack(packed, self.shape, self.form, dtype, blocks)

    def forward(self, x: Float[Tensor, "*B inputs"]) -> Float[Tensor, "*B outputs"]:
        """The output of the dequantized layer, bit for bit."""
        return _Product.apply(x, self, self.bias)

    def product(self, x: Float[Tensor, "*B inputs"]) -> Float[Tensor, "*B outputs"]:
        """The output without the bias."""
        return _Product.apply(x, self, None)


def _block_numbers(part: Part, device: torch.device) -> Int64[Tensor, " n"]:
    """The index in the full weight of each block of a shard."""
    blocks = part.in_blocks(BLOCK)
    assert blocks is not None
    rows, stride = blocks.whole
    own = [torch.arange(each.start, each.stop, device=device) for each in blocks.own.shards]
    return (torch.arange(rows, device=device)[:, None] * stride + torch.cat(own)).view(-1)


class _Product(torch.autograd.Function):
    """x W^T + b without saved tensors: W is unpacked again for the gradient of x."""

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
"""Kinds of layers that can be tensor-parallel."""


def weight_shape(layer: LinearLayer) -> torch.Size:
    """Shape of this process's shard of a layer's weight, quantized or not."""
    return layer.shape if isinstance(layer, QuantizedLinear) else layer.weight.shape


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer stores its weight as (inputs, outputs)."""
    return layer.transposed if isinstance(layer, QuantizedLinear) else isinstance(layer, Conv1D)


def quantized(
    model: nn.Module, config: FrozenModelConfig, *, device: torch.device | None = None
) -> nn.Module:
    """`model`, with the frozen linear weights of its blocks quantized as in the settings.

    Adapters, biases, norms, embeddings and heads are not quantized; neither are weights that two
    layers share, and weights outside of linear layers, such as those of a mixture's experts.
    `device` is passed to `QuantizedLinear`.

    Raises:
        ConfigError: the model's blocks have no linear layers.
    """
    if config.quantize == "none":
        return model
    form = Form(config.quantize, double=config.double_quant)
    if not quantize_layers(model, form, device=device):
        raise ConfigError(
            f"quantize {config.quantize}: the blocks of {config.path} have no linear layers to"
            " quantize; set quantize none"
        )
    return model


def quantize_layers(model: nn.Module, form: Form, *, device: torch.device | None = None) -> int:
    """Quantize the linear layers of the blocks, one by one, and return their number."""
    layers = list(_layers(model))
    for module, name, layer in layers:
        setattr(module, name, QuantizedLinear(layer, form, device=device))
        layer.register_parameter("weight", None)  # free the weight, which `layers` still references
    return len(layers)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Quantized layers by their names in the model."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def num_weights(model: nn.Module) -> int:
    """Number of weights of the model, quantized or not; tied weights count once."""
    layers = quantized_layers(model).values()
    packed = {id(layer.get_parameter(name)) for layer in layers for name in parts_of(layer.form)}
    plain = sum(param.numel() for param in model.parameters() if id(param) not in packed)
    return plain + sum(layer.shape.numel() for layer in layers)


def dequantized_weights(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Named weights, with quantized ones dequantized to fp32.

    All `weights` of a layer are in place while one of them is yielded.
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
    """Round the results of `dequantized_weights`, after merging, to the layers' formats."""
    formats = {
        f"{name.removesuffix('.base_layer')}.weight": layer.dtype
        for name, layer in quantized_layers(model).items()
    }
    for name, tensor in weights:
        yield name, tensor.to(formats.get(name, tensor.dtype))


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """Layers to replace, as (parent module, attribute name)."""
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
