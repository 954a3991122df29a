"""Adapters that begin as a part of the weight that they adapt: PiSSA and OLoRA.

PiSSA (Meng et al. 2024, arXiv:2404.02948, equations 2 to 4) begins with the largest singular values
and vectors of W, OLoRA (Büyükakyüz 2024, arXiv:2406.01775, section 3) with its QR decomposition.
Both freeze the rest of the weight, W - s B0 A0. Here W stays whole, and what the halves began as is
kept beside them, frozen:

    W x + s (B A - B0 A0) x = W x + s [B, B - B0] [A - A0; A0] x

That is the same function of A and B, so that they have the same gradients. At the start it adds 0
bit for bit, whatever the number format of W; with the adapter off the layer is W, the reference; W
may stay in its file or in 4 bits; and the right side is a plain adapter of twice the rank.
"""

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from pipeline.models.adapter_parts import halves_of, product_of
from pipeline.models.layer_variant import LayerVariant, is_turned, variant_in

Kind = Literal["pissa", "olora"]

EXACT = 1024
"""Rows or columns up to which singular vectors are computed all, by LAPACK; of larger weights those
that are needed, by subspace iteration."""

ITERATIONS, SPARE = 16, 16
"""Of subspace iteration: how often, and vectors more than are needed (Halko et al. 2011, algorithm
4.4). PiSSA's authors iterate 16 times, too."""


class Principal(LayerVariant):
    """PiSSA and OLoRA: computes W' x, the left side of the equation above, and the bias."""

    def __init__(self, kind: Kind, layer: LoraLayer) -> None:
        self.kind: Kind = kind
        self.read: Callable[[Tensor, Tensor], Tensor] = F.linear
        """The product with what reads the layer's input, by which it may be kept in parts."""
        for half, module in zip("AB", _modules(layer), strict=True):
            first = nn.Parameter(torch.zeros_like(module.weight), requires_grad=False)
            setattr(layer, f"lora_start_{half}", nn.ParameterDict({"default": first}))

    def start(self, layer: LoraLayer, weight: Float[Tensor, "out in"]) -> None:
        """Begin with a part of `weight`, which the layer has."""
        rank, scaling = layer.r["default"], layer.scaling["default"]
        if self.kind == "pissa":
            halves = [half / scaling**0.5 for half in singular_halves(weight, rank)]
        else:
            halves = orthogonal_halves(weight, rank)
        for half, own, first in zip(halves, halves_of(layer), _first(layer), strict=True):
            own.copy_(half)
            first.copy_(half)

    def started(self, layer: LoraLayer) -> list[Tensor]:
        """What `start` has written."""
        return [*halves_of(layer), *_first(layer)]

    @staticmethod
    def first(layer: LoraLayer) -> tuple[nn.ParameterDict, nn.ParameterDict]:
        """Where a layer keeps what A and B began as."""
        down, up = layer.lora_start_A, layer.lora_start_B  # pyright: ignore[reportAttributeAccessIssue]
        return down, up

    @staticmethod
    def forward(
        module: LoraLayer,
        active_adapter: str,
        x: Float[Tensor, "*B in"],
        result: Float[Tensor, "*B out"],
        **_: Any,  # noqa: ANN401
    ) -> Float[Tensor, "*B out"]:
        """W' x and the bias, by the equation above, from `result`: W x and the bias."""
        down, up = widened(*halves_of(module), *_first(module))
        read = cast("Principal", variant_in(module)).read(x, down)
        return result + F.linear(read, up) * module.scaling[active_adapter]

    def merged(self, layer: LoraLayer, weight: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """W + s (B A - B0 A0) in fp32, as the layer stores weights."""
        down, up = widened(*halves_of(layer), *_first(layer))
        update = product_of(layer, down, up).mul_(layer.scaling["default"])
        return (update.T if is_turned(layer) else update).add_(weight)


def widened(
    down: Float[Tensor, "rank in"],
    up: Float[Tensor, "out rank"],
    first_down: Float[Tensor, "rank in"],
    first_up: Float[Tensor, "out rank"],
) -> tuple[Float[Tensor, "twice in"], Float[Tensor, "out twice"]]:
    """The halves of a plain adapter that does the same: [A - A0; A0] and [B, B - B0].

    Of all that do it this one adds exactly nothing at the start, and later no large numbers that
    cancel each other.
    """
    return torch.cat([down - first_down, first_down]), torch.cat([up, up - first_up], dim=1)


def singular_halves(weight: Float[Tensor, "out in"], rank: int) -> list[Float[Tensor, "_ _"]]:
    """sqrt(S) V^T and U sqrt(S) of the largest singular values (PiSSA, equations 2 and 3)."""
    if min(weight.shape) <= EXACT:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        left, values, right = _leading_vectors(weight, rank)
    roots = values[:rank].sqrt()
    return [roots[:, None] * right[:rank], left[:, :rank] * roots]


def _leading_vectors(
    weight: Float[Tensor, "out in"], rank: int
) -> tuple[Float[Tensor, "out n"], Float[Tensor, " n"], Float[Tensor, "n in"]]:
    """The largest singular values and their vectors, by iteration from fixed random numbers."""
    size = (weight.shape[1], min(rank + SPARE, *weight.shape))
    basis = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(weight.device)
    for _ in range(ITERATIONS):
        image = torch.linalg.qr(weight @ basis).Q
        basis = torch.linalg.qr(weight.T @ image).Q
    left, values, right = torch.linalg.svd(weight @ basis, full_matrices=False)
    return left, values, right @ basis.T


def orthogonal_halves(weight: Float[Tensor, "out in"], rank: int) -> list[Float[Tensor, "_ _"]]:
    """The first rows of R and columns of Q, of W = Q R."""
    # Householder reflections take column after column: the first need no others.
    columns = torch.linalg.qr(weight[:, :rank]).Q
    return [columns.T @ weight, columns]


def _modules(layer: LoraLayer) -> tuple[nn.Linear, nn.Linear]:
    return cast("nn.Linear", layer.lora_A["default"]), cast("nn.Linear", layer.lora_B["default"])


def _first(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    down, up = Principal.first(layer)
    return down["default"], up["default"]
