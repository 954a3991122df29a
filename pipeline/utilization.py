"""How near training comes to what its processors can do: MFU and HFU.

Model FLOPs utilization is the share of the peak that the operations of the model make up, as if
nothing were computed twice; hardware FLOPs utilization counts what gradient checkpointing computes
again as well (Chowdhery et al. 2022, section 4.1 and appendix B; Korthikanti et al. 2022, section
6.3). Operations are those of `pipeline.budget.flops`: six for each trained weight and token, and
attention, logits for the tokens alone whose prediction is learned.
"""

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.budget.flops import ModelFlops, data_sheet_peak, measured_peak, model_flops
from pipeline.parallel.device import local_device
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import Mesh
from pipeline.run import AtPeak

logger = logging.getLogger(__name__)


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
