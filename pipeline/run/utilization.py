"""How near training comes to what its processors can do: MFU and HFU.

Model FLOPs utilization is the share of the peak that the operations of the model make up, as if
nothing were computed twice; hardware FLOPs utilization counts what gradient checkpointing computes
again as well (Chowdhery et al. 2022, section 4.1 and appendix B; Korthikanti et al. 2022, section
6.3). A product of matrices takes two operations for each weight and token; attention takes four for
each token, each token before it and each number of a head's width. Norms, activations and look-ups
are left out; logits are counted for the tokens alone whose prediction is learned.
"""

import functools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from pipeline.budget.machine import data_sheet_peak, measured_peak
from pipeline.engine.tensor_parts import whole_shape
from pipeline.models.forward import base_model
from pipeline.models.quantized import QuantizedLinear
from pipeline.parallel.device import local_device
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import Mesh
from pipeline.run.run import AtPeak

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Peak:
    """Operations a second that processors do at most."""

    flops: float
    """Operations per second of one process's device, or of all of them."""

    basis: str
    """Where the figure comes from."""


@dataclass(frozen=True)
class Utilization:
    """What sequences cost in seconds of all processes at their peak."""

    flops: ModelFlops

    recomputed: float
    """Share of the blocks that the backward pass computes again."""

    peak: Peak
    """Of all processes."""

    def training(self, sequences: Iterable[tuple[int, int]]) -> AtPeak:
        """Seconds of a forward and a backward pass at the peak.

        Args:
            sequences: of each its tokens, and those whose prediction is learned; of all processes.
        """
        model = again = 0.0
        for length, targets in sequences:
            model += self.flops.training(length, targets)
            again += self.recomputed * self.flops.recomputation(length)
        return AtPeak(model / self.peak.flops, (model + again) / self.peak.flops)

    def forward(self, sequences: Iterable[tuple[int, int]]) -> float:
        """Seconds of a forward pass at the peak; `sequences` are those of `training`."""
        flops = sum(self.flops.scoring(*each) for each in sequences)
        return flops / self.peak.flops


def utilization_of(model: nn.Module, *, peak_tflops: float | None, mesh: Mesh) -> Utilization:
    """Utilization of a model that learns, as it is set up; all processes call it.

    `peak_tflops` is that of one process's device, where it is not to be looked up or measured.
    """
    own = Peak(1e12 * peak_tflops, "as set") if peak_tflops else device_peak(_format(model))
    peak = Peak(mesh.world.sum(own.flops), own.basis)
    return Utilization(_of_stages(model_flops(model), mesh.stages), _recomputed(model), peak)


def log_peaks(*models: Utilization) -> None:
    """Say of what `mfu` and `hfu` are shares, once for each number format."""
    for peak in dict.fromkeys(each.peak for each in models):
        logger.info(
            "mfu and hfu are shares of %.4g TFLOP/s, %s: operations of the model, and with those"
            " that gradient checkpointing repeats (docs/report.md)",
            peak.flops / 1e12,
            peak.basis,
        )


def _of_stages(own: ModelFlops, stages: Group) -> ModelFlops:
    """The operations of all stages of a model together."""
    if stages.size == 1:
        return own
    weights, trained, head, learns = stages.sums(
        [own.weights, own.trained, own.head, own.head_learns]
    )
    return replace(
        own,
        weights=int(weights),
        trained=int(trained),
        head=int(head),
        head_learns=learns > 0,
    )


@functools.cache
def device_peak(dtype: torch.dtype) -> Peak:
    """The peak of this process's device in a number format: of its data sheet, or measured.

    A data sheet gives the peak of 16-bit products on a known GPU. Each process measures once.
    """
    device = local_device()
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        known = data_sheet_peak(torch.cuda.get_device_name(device))
        if known is not None:
            return Peak(known[0], f"by the data sheet of an {known[1]}")
    name = str(dtype).removeprefix("torch.")
    return Peak(measured_peak(device, dtype), f"of a product of matrices in {name} measured here")


def _recomputed(model: nn.Module) -> float:
    """The share of the blocks that do not keep their activations."""
    blocks = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    return sum(each.gradient_checkpointing for each in blocks) / max(1, len(blocks))


def _format(model: nn.Module) -> torch.dtype:
    """The number format that most weights are multiplied in."""
    formats = [param.dtype for param in model.parameters() if param.is_floating_point()]
    return max(set(formats), key=formats.count)
