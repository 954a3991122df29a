"""Weights of a head that no file holds."""

from collections.abc import Collection
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel


def draw_layers(model: PreTrainedModel, names: Collection[str], *, seed: int) -> None:
    """Draw the layers whose weights are among `names`; the same on every process."""
    for name in sorted(names):
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight":
            _initialize(cast("nn.Linear", model.get_submodule(layer)), seed=seed)


def _initialize(head: nn.Linear, *, seed: int) -> None:
    """Draw from N(0, 1 / sqrt(d + 1)), d the inputs (Stiennon et al. 2020, appendix B)."""
    generator = torch.Generator().manual_seed(seed)
    std = (head.in_features + 1) ** -0.5
    weight = torch.randn(head.weight.shape, generator=generator) * std
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()
