"""DoRA: a weight's direction learns as in LoRA, and the length of each row by itself.

Liu et al. 2024 (arXiv:2402.09353), equation 5, with W (out, in) and one length for each output:

    W' = m (W + s B A) / |W + s B A|

The lengths in the denominator count as constants in the backward pass (section 4.3), as in peft.
At the start m = |W| by the same sums, so that W' is W bit for bit.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from pipeline.models.adapter_parts import halves_of, parts_of_adapter, update_of
from pipeline.models.layer_variant import LayerVariant, is_turned

LENGTHS = "lora_magnitude_vector"
"""What peft calls the lengths that DoRA learns."""

BLOCK = 2**20
"""Elements of a weight whose lengths are computed at once, in fp32."""


class Magnitude(nn.Module):
    """The lengths that learn, where peft has them."""

    def __init__(self, out_features: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out_features, device=device))


class Dora(LayerVariant):
    """W' x and the bias."""

    def __init__(self, layer: LoraLayer) -> None:
        self._measured: Tensor | None = None
        """Lengths of this pass, where each part has some columns of the weight, and of A."""
        up = halves_of(layer)[1]
        layer.lora_magnitude_vector["default"] = Magnitude(len(up), up.device)
        layer.use_dora["default"] = True

    def start(self, layer: LoraLayer, weight: Float[Tensor, "out in"]) -> None:
        """Have the lengths of `weight`."""
        magnitude = _magnitude(layer)
        magnitude.copy_(row_lengths(weight))

    def started(self, layer: LoraLayer) -> list[Tensor]:
        """What `start` has written."""
        return [_magnitude(layer)]

    @torch.no_grad()
    def measure(self, layer: LoraLayer) -> None:
        """Find the lengths of rows of which each part of a layer has some columns.

        Parts that run one after the other need them before the first of them runs.
        """
        if not layer.disable_adapters:
            self._measured = _lengths(layer, _weight(layer))

    @staticmethod
    def forward(
        module: LoraLayer,
        active_adapter: str,
        x: Float[Tensor, "*B in"],
        result: Float[Tensor, "*B out"],
        **_: Any,  # noqa: ANN401
    ) -> Float[Tensor, "*B out"]:
        """W' x and the bias, from `result`, which is W x and the bias.

        Dropout is of the adapter's input alone. Where parts have columns of the weight, W x and
        W' x are sums over them, to which the bias is added later.
        """
        base, parts = module.get_base_layer(), parts_of_adapter(module)
        by_columns = parts is not None and parts.are_columns
        if by_columns:
            measured = _variant(module)._measured  # noqa: SLF001  # of the layer's own variant
            lengths = _lengths(module, _weight(module)) if measured is None else measured
        else:  # what there is of the layer now, all of it or a part, has whole rows
            lengths = _own_lengths(module, _weight(module))
        factor = _factor(module, lengths)
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        update = up(down(module.lora_dropout[active_adapter](x))) * module.scaling[active_adapter]
        in_result = base.bias is not None and not by_columns
        plain = result - cast("Tensor", base.bias) if in_result else result
        # Nothing is added to `result` where the factor is 1 and the update 0, as at the start.
        return result + ((factor - 1) * plain + factor * update)

    def merged(self, layer: LoraLayer, weight: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """W' in fp32, as the layer stores weights."""
        factor = _factor(layer, _lengths(layer, _as_linear(layer, weight)))
        turned = factor if is_turned(layer) else factor[:, None]
        return update_of(layer).float().add_(weight).mul_(turned)


def measured_weights(model: nn.Module) -> tuple[int, int]:
    """Numbers in the weights whose lengths each pass computes, and the rank of their adapters.

    Both are 0 of a model without DoRA.
    """
    layers = [each for each in model.modules() if isinstance(each, LoraLayer)]
    layers = [each for each in layers if len(each.lora_magnitude_vector)]
    numbers = sum((each.in_features or 0) * (each.out_features or 0) for each in layers)
    return numbers, max((each.r["default"] for each in layers), default=0)


@torch.no_grad()
def row_lengths(
    weight: Float[Tensor, "out in"],
    down: Float[Tensor, "rank in"] | None = None,
    up: Float[Tensor, "out rank"] | None = None,
    *,
    scaling: float = 1.0,
) -> Float[Tensor, " out"]:
    """|W + s B A| of each row, in fp32; |W| without the halves A, `down`, and B, `up`.

    The sum is made of some rows at a time and never whole. Where B is 0 the bits are those of |W|.
    """
    lengths = torch.empty(len(weight), device=weight.device)
    rows = max(1, BLOCK // weight.shape[1])
    for first in range(0, len(weight), rows):
        block = slice(first, first + rows)
        total = weight[block].float().contiguous()
        if down is not None and up is not None:
            total = total.addmm(up[block], down, alpha=scaling)
        lengths[block] = torch.linalg.vector_norm(total, dim=1)
    return lengths


def _lengths(layer: LoraLayer, weight: Float[Tensor, "out in"]) -> Float[Tensor, " out"]:
    """|W + s B A| of each row of this process's weight, part by part."""
    parts = parts_of_adapter(layer)
    if parts is None:
        return _own_lengths(layer, weight)
    scaling, found = layer.scaling["default"], torch.empty(len(weight), device=weight.device)
    squares: list[Tensor] = []
    for piece, down, up in parts.halves(*halves_of(layer)):
        own = row_lengths(piece.of(weight), down, up, scaling=scaling)
        if parts.are_columns:
            squares.append(own.square())
        else:
            piece.put(own, found)
    return parts.parts.total(squares, "lengths of rows").sqrt() if parts.are_columns else found


def _own_lengths(layer: LoraLayer, weight: Float[Tensor, "out in"]) -> Float[Tensor, " out"]:
    down, up = halves_of(layer)
    return row_lengths(weight, down, up, scaling=layer.scaling["default"])


def _factor(layer: LoraLayer, lengths: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
    """The factor m / |W + s B A|; of a row without a length it is 0."""
    return _magnitude(layer) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)


def _magnitude(layer: LoraLayer) -> Tensor:
    return cast("Tensor", layer.lora_magnitude_vector["default"].weight)


def _variant(layer: LoraLayer) -> Dora:
    return cast("Dora", layer.lora_variant["default"])


def _weight(layer: LoraLayer) -> Float[Tensor, "out in"]:
    return _as_linear(layer, cast("Tensor", layer.get_base_layer().weight))


def _as_linear(layer: LoraLayer, weight: Tensor) -> Float[Tensor, "out in"]:
    return weight.T if is_turned(layer) else weight
