"""Floating-point operations of a model, by the shapes of its matrices.

A product of matrices takes two operations for each weight and token; attention takes four for each
token, each token before it and each number of a head's width (Chowdhery et al. 2022, appendix B,
which like this counts what a causal mask leaves out). Norms, activations and look-ups are left out.
Logits are counted for every token, but by `training`, which knows for which ones there are any.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from pipeline.engine.tensor_parts import whole_shape
from pipeline.models.forward import base_model
from pipeline.models.quantized import QuantizedLinear


@dataclass(frozen=True)
class ModelFlops:
    """What one model takes for each token."""

    weights: int
    """In matrices that tokens are multiplied with, the output layer included."""

    trained: int
    """Of these, those that learn."""

    layers: int

    width: int
    """Numbers in the queries of one token and layer: heads times their width."""

    head: int = 0
    """Of `weights`, those of the output layer; 0 for a model that scores."""

    head_learns: bool = False

    def forward(self, length: int) -> int:
        """Operations for each token of sequences of `length` tokens."""
        return 2 * self.weights + 4 * self.layers * self.width * length

    def train(self, length: int, *, recomputes: bool = False) -> int:
        """Operations for each token of a forward and a backward pass.

        The gradient of a product's input takes as much as the product, that of its weights too;
        weights that are frozen have none. Recomputation is one more forward pass.
        """
        backward = self.forward(length) + 4 * self.layers * self.width * length + 2 * self.trained
        return self.forward(length) * (2 if recomputes else 1) + backward

    def training(self, length: int, targets: int) -> int:
        """Operations of both passes over one sequence with logits for `targets` of its tokens."""
        of_logits = 4 * self.head + 2 * self.head * self.head_learns
        return length * self._blocks.train(length) + targets * of_logits

    def scoring(self, length: int, targets: int) -> int:
        """Operations of one forward pass over one sequence, logits for `targets` of its tokens."""
        return self.recomputation(length) + 2 * self.head * targets

    def recomputation(self, length: int) -> int:
        """Operations of one more forward pass over one sequence, without the output layer."""
        return length * self._blocks.forward(length)

    @property
    def _blocks(self) -> "ModelFlops":
        """All but the output layer."""
        return replace(
            self,
            weights=self.weights - self.head,
            trained=self.trained - self.head * self.head_learns,
        )


def model_flops(model: nn.Module) -> ModelFlops:
    """Operations of a causal language model or a classifier; it may be on the meta device.

    Layers of which this process has a part count whole.
    """
    config = base_model(model).config
    matrices = list(_matrices(model))
    head = _head(model)
    return ModelFlops(
        weights=sum(numel for numel, _ in matrices),
        trained=sum(numel for numel, learns in matrices if learns),
        layers=config.num_hidden_layers,
        width=config.num_attention_heads * _head_width(config),
        head=0 if head is None else whole_shape(head.weight).numel(),
        head_learns=head is not None and head.weight.requires_grad,
    )


def _head(model: nn.Module) -> nn.Linear | None:
    """The layer that gives logits of the whole vocabulary."""
    plain = base_model(model)
    head = plain.get_output_embeddings()
    is_head = isinstance(head, nn.Linear) and head.out_features >= plain.config.vocab_size
    return head if is_head else None


def _matrices(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """The numbers in each matrix, and whether they learn."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            yield module.shape.numel(), False
        elif isinstance(module, nn.Linear | Conv1D):
            yield whole_shape(module.weight).numel(), module.weight.requires_grad


def _head_width(config: PreTrainedConfig) -> int:
    width = getattr(config, "head_dim", None)
    return width or config.hidden_size // config.num_attention_heads


PEAKS = {"A100": 312, "A800": 312, "H100": 989, "H200": 989, "H20": 148, "B200": 2250, "L40S": 362}
"""TFLOP/s of bf16 on tensor cores without sparsity, by NVIDIA's data sheets."""

SIDE = {"cpu": 512, "cuda": 4096}
"""Rows and columns of the matrices whose product is timed."""

SECONDS = 0.2
"""Time for which products are repeated; the fastest one counts."""


def data_sheet_peak(name: str) -> tuple[float, str] | None:
    """Operations per second of a GPU by its name, and the card; None if it is not known."""
    for card in sorted(PEAKS, key=len, reverse=True):
        if card.lower() in name.lower():
            return 1e12 * PEAKS[card], card
    return None


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of the fastest of several products of square matrices."""
    side = SIDE[device.type]
    left, right = torch.ones(2, side, side, device=device, dtype=dtype)
    fastest, end = float("inf"), time.perf_counter() + SECONDS
    with torch.no_grad():
        torch.mm(left, right)  # the first allocates and starts threads
        while time.perf_counter() < end or fastest == float("inf"):
            _wait(device)
            start = time.perf_counter()
            torch.mm(left, right)
            _wait(device)
            fastest = min(fastest, time.perf_counter() - start)
    return 2 * side**3 / fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
