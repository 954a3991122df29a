"""Model FLOPs utilization (MFU): training time at the processors' peak over the time it took.

A product of matrices takes two operations for each weight and token in the forward pass, two in the
backward pass, and two more for each trained weight; attention takes 12 L H Q for each token and
token before it (Chowdhery et al. 2022, appendix B). Norms, activations, look-ups and recomputation
are left out; logits are counted for tokens alone whose prediction is learned.
"""

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pipeline.budget.machine import data_sheet_peak, measured_peak
from pipeline.engine.tensor_parts import whole_shape
from pipeline.models.forward import base_model
from pipeline.models.quantized import QuantizedLinear
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import Mesh

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Utilization:
    """Operations of a forward and a backward pass, and the peak of all processes."""

    per_token: float
    """Of the matrices of the blocks, for each token."""

    per_target: float
    """Of the output layer, for each token whose prediction is learned."""

    attention: float
    """For each token and token of its sequence."""

    peak: float
    """Operations per second of all processes."""

    def seconds(self, sequences: Iterable[tuple[int, int]]) -> float:
        """Seconds of both passes at the peak.

        Args:
            sequences: (tokens, tokens whose prediction is learned) of all processes.
        """
        operations = sum(
            length * (self.per_token + self.attention * length) + targets * self.per_target
            for length, targets in sequences
        )
        return operations / self.peak


def utilization_of(model: nn.Module, *, peak_tflops: float | None, mesh: Mesh) -> Utilization:
    """Utilization of a trained model; all processes call it, the main process logs the peak.

    Args:
        model: a language model or a classifier, or the stage of one.
        peak_tflops: of one process's device; None takes its data sheet, or measures it.
        mesh: the job's processes.
    """
    plain = base_model(model)
    config, head = plain.config, plain.get_output_embeddings()
    is_head = isinstance(head, nn.Linear) and head.out_features >= config.vocab_size
    per_token = per_target = 0.0
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            per_token += 4 * module.shape.numel()
        elif isinstance(module, nn.Linear | Conv1D):
            weight = module.weight
            operations = (6 if weight.requires_grad else 4) * whole_shape(weight).numel()
            if is_head and module is head:
                per_target += operations
            else:
                per_token += operations
    per_token, per_target = mesh.stages.sums([per_token, per_target])
    head_width = getattr(config, "head_dim", None)
    width = config.num_attention_heads * (
        head_width or config.hidden_size // config.num_attention_heads
    )
    formats = [param.dtype for param in model.parameters() if param.is_floating_point()]
    device = peak_tflops or device_tflops(max(set(formats), key=formats.count))
    peak = mesh.world.sum(1e12 * device)
    if mesh.is_main:
        logger.info("mfu is the share of a peak of %.4g TFLOP/s (docs/report.md)", peak / 1e12)
    return Utilization(per_token, per_target, 12.0 * config.num_hidden_layers * width, peak)


@functools.cache
def device_tflops(dtype: torch.dtype) -> float:
    """10^12 operations per second of this process's device in a number format.

    On a known GPU the data sheet's figure of 16-bit products; otherwise measured.
    """
    device = local_device()
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        known = data_sheet_peak(torch.cuda.get_device_name(device))
        if known is not None:
            return known[0] / 1e12
    return measured_peak(device, dtype) / 1e12
