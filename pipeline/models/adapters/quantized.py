"""Frozen linear layers whose weights are stored in 4 or 8 bits (Dettmers et al. 2023, QLoRA).

Weights are stored in blocks of 64 values, each block with a scale. NF4 follows section 3 and
appendix E: the 16 levels are quantiles of a normal distribution, and a weight is its level times
the largest magnitude of its block. int8 has 255 equally spaced levels instead. A flattened weight
is split into blocks in order; the last one is padded with zeros. Scales are stored in fp32.

The vectors of codes and scales are the layer's parameters: they are frozen, and the engine lays
them out, shards, offloads and saves them like any frozen weight. The forward and the backward pass
each dequantize the weight temporarily.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.config import FrozenModelConfig
from pipeline.engine.sharding.units import ROOT, find_units
from pipeline.kernels import elementwise
from pipeline.system.errors import ConfigError

BLOCK = 64
"""Number of weights that share a scale."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of the 4-bit codes 0 to 15 (QLoRA, appendix E)."""

INT8_STEPS = 127
"""Number of steps of an 8-bit code on either side of zero."""

CHUNK = 2**20
"""Number of weights that are packed or unpacked at once, a multiple of `BLOCK`."""

Packed = Mapping[str, Tensor]
"""Codes and scales of a quantized weight, by name."""

Scheme = Literal["nf4", "int8"]
"""Format of the codes."""

SCALES = "scales"
CODES = "codes"


def weights_per_code(scheme: Scheme) -> int:
    """Return the number of weights in one element of the codes."""
    return 2 if scheme == "nf4" else 1


def quantize(weight: Float[Tensor, "*S"], scheme: Scheme) -> dict[str, Tensor]:
    """Return the codes and scales of `weight`, on its device; they are the same on all devices.

    Codes are rounded to nearest; ties go to the lower code in NF4 and to the even one in int8.
    """
    flat = weight.detach().reshape(-1)
    num_blocks, per_code = -(-len(flat) // BLOCK), weights_per_code(scheme)
    dtype = torch.uint8 if scheme == "nf4" else torch.int8
    codes = torch.empty(num_blocks * BLOCK // per_code, dtype=dtype, device=flat.device)
    scales = torch.empty(num_blocks, device=flat.device)
    for start in () if flat.is_meta else range(0, len(flat), CHUNK):
        chunk = flat[start : start + CHUNK].float()
        by_block = F.pad(chunk, (0, -len(chunk) % BLOCK)).view(-1, BLOCK)
        max_abs = by_block.abs().amax(1)
        scales[start // BLOCK :][: len(max_abs)] = max_abs
        normalized = by_block / torch.where(max_abs > 0, max_abs, 1.0)[:, None]
        if scheme == "nf4":
            packed = _nf4_codes(normalized)
        else:
            packed = (normalized * INT8_STEPS).round_().to(torch.int8).view(-1)
        codes[start // per_code :][: len(packed)] = packed
    return {CODES: codes, SCALES: scales}


def dequantize(packed: Packed, shape: torch.Size, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight of `shape`, computed in fp32 and rounded once."""
    codes, scales = packed[CODES], packed[SCALES]
    if scheme == "int8":
        scales = scales / INT8_STEPS
    per_code = weights_per_code(scheme)
    flat = torch.empty(len(codes) * per_code, dtype=dtype, device=codes.device)
    size = CHUNK * 16 if codes.is_cuda else CHUNK  # fewer launches, and fewer nodes of a graph
    for start in range(0, len(flat), size):
        stop = min(start + size, len(flat))
        chunk = codes[start // per_code : stop // per_code]
        out = flat[start:stop].view(-1, BLOCK)
        values = out if dtype == torch.float32 else torch.empty(out.shape, device=codes.device)
        block_scales, pairs = scales[start // BLOCK : stop // BLOCK], _pairs(codes.device)
        if scheme == "int8":
            torch.mul(chunk.view_as(values), block_scales[:, None], out=values)
        elif not elementwise.dequantize(chunk, pairs, block_scales, values):
            torch.index_select(pairs, 0, chunk.int(), out=values.view(torch.int64).view(-1))
            values *= block_scales[:, None]
        if values is not out:
            out.copy_(values)
    return flat[: shape.numel()].view(shape)


def _nf4_codes(normalized: Float[Tensor, "blocks size"]) -> Shaped[Tensor, " n"]:
    """Round to codes, and pack two per byte, the first in the high half."""
    levels = torch.tensor(NF4)
    codes = torch.zeros_like(normalized, dtype=torch.uint8)
    for edge in ((levels[1:] + levels[:-1]) / 2).tolist():  # several times faster than bucketize
        codes += normalized > edge
    return (codes[:, ::2] * 16 + codes[:, 1::2]).view(-1)


@functools.lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Int64[Tensor, " 256"]:
    """Return a table of the two fp32 values of each byte, as one int64 for a faster lookup."""
    levels = torch.tensor(NF4, device=device)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    return pairs.view(torch.int64).view(-1)


class QuantizedLinear(nn.Module):
    """A frozen `nn.Linear`, or GPT-2's `Conv1D`, that stores a quantized weight.

    `scheme` is the format of the codes. They are stored on `device`, by default the weight's.
    """

    bias: nn.Parameter | None

    def __init__(
        self, layer: nn.Linear | Conv1D, scheme: Scheme, *, device: torch.device | None = None
    ) -> None:
        super().__init__()
        weight = layer.weight
        self.scheme, self.shape, self.dtype = scheme, weight.shape, weight.dtype
        self.transposed = isinstance(layer, Conv1D)
        packed = quantize(weight.detach().to(device or weight.device), scheme)
        for name, vector in packed.items():
            self.register_parameter(name, nn.Parameter(vector, requires_grad=False))
        self.bias = cast("nn.Parameter | None", layer.bias)

    @property
    def weight(self) -> Float[Tensor, "rows columns"]:
        """The dequantized weight, rounded to the layer's data type."""
        return self.dequantize(self.dtype)

    @property
    def in_features(self) -> int:
        """Size of the input."""
        return self.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        """Size of the output."""
        return self.shape[1 if self.transposed else 0]

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "rows columns"]:
        """Return the weight, computed in fp32 and rounded once to `dtype`."""
        packed = {name: self.get_parameter(name) for name in (CODES, SCALES)}
        return dequantize(packed, self.shape, self.scheme, dtype)

    def forward(self, x: Float[Tensor, "*B inputs"]) -> Float[Tensor, "*B outputs"]:
        """Return an output that is bit-identical to that of the dequantized layer."""
        return _DequantizedLinear.apply(x, self, self.bias)


class _DequantizedLinear(torch.autograd.Function):
    """Computes x W^T + b without saving tensors: W is dequantized again for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.layer = layer
        packed = layer.get_parameter(CODES), layer.get_parameter(SCALES)
        shape, settings = list(layer.shape), (layer.scheme, layer.dtype, layer.transposed)
        return quantized_linear(x, *packed, bias, shape, *settings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:  # noqa: ANN401
        if not ctx.needs_input_grad[0]:
            return None, None, None
        weight = ctx.layer.weight
        return grads[0] @ (weight.T if ctx.layer.transposed else weight), None, None


@torch.library.custom_op("rlhf_pipeline::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    shape: list[int],
    scheme: str,
    dtype: torch.dtype,
    transposed: bool,  # noqa: FBT001  # operators have positional arguments
) -> Tensor:
    """Compute x W^T + b as one operator, so that a recorded pass keeps no dequantized weight."""
    packed = {CODES: codes, SCALES: scales}
    weight = dequantize(packed, torch.Size(shape), cast("Scheme", scheme), dtype)
    return F.linear(x, weight.T if transposed else weight, bias)


LinearLayer = nn.Linear | Conv1D | QuantizedLinear
"""Kinds of linear layers, quantized or not."""


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer stores its weight as (inputs, outputs)."""
    return layer.transposed if isinstance(layer, QuantizedLinear) else isinstance(layer, Conv1D)


def quantize_model(
    model: nn.Module, config: FrozenModelConfig, *, device: torch.device | None = None
) -> nn.Module:
    """Quantize the frozen linear weights of the model's blocks as in the settings; return `model`.

    Adapters, biases, norms, embeddings and heads are not quantized, nor are weights that two layers
    share or weights outside of linear layers, such as those of a mixture's experts.
    `device` is passed to `QuantizedLinear`.

    Raises:
        ConfigError: the model's blocks have no linear layers.
    """
    if config.quantize == "none":
        return model
    if not quantize_layers(model, config.quantize, device=device):
        raise ConfigError(
            f"quantize {config.quantize}: the blocks of {config.path} have no linear layers to"
            " quantize; set quantize to none"
        )
    return model


def quantize_layers(model: nn.Module, scheme: Scheme, *, device: torch.device | None = None) -> int:
    """Quantize the linear layers of the blocks, one by one, and return their number."""
    layers = list(_quantizable_layers(model))
    for module, name, layer in layers:
        setattr(module, name, QuantizedLinear(layer, scheme, device=device))
        layer.register_parameter("weight", None)  # free the weight, which `layers` still references
    return len(layers)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized layers by their names in the model."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def num_weights(model: nn.Module) -> int:
    """Return the number of weights of the model, quantized or not; tied weights count once."""
    layers = quantized_layers(model).values()
    packed = {id(layer.get_parameter(name)) for layer in layers for name in (CODES, SCALES)}
    plain = sum(param.numel() for param in model.parameters() if id(param) not in packed)
    return plain + sum(layer.shape.numel() for layer in layers)


def _quantizable_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """Yield the layers to replace, as (parent module, attribute name, layer)."""
    use_counts = Counter(
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
                if use_counts[cast("nn.Parameter", child.weight)] == 1:
                    yield module, name, child
