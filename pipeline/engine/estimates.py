"""DeepSpeed's estimates of memory, by its own formulas and in its own words."""

from collections.abc import Sequence
from dataclasses import dataclass

BUFFER_FACTOR = 1.5
"""DeepSpeed's allowance for buffers in host memory."""


@dataclass(frozen=True)
class Estimate:
    """One line of DeepSpeed's tables, in bytes."""

    cpu: int
    """On each machine."""

    gpu: int
    """On each GPU."""

    options: str


def estimate_zero2(params: int, *, gpus: int = 1, nodes: int = 1) -> list[Estimate]:
    """DeepSpeed's `estimate_zero2_model_states_mem_needs_all_cold`, line by line.

    Args:
        params: parameters of the model.
        gpus: GPUs of each machine.
        nodes: machines.
    """
    world = gpus * nodes
    offloaded_cpu = int(params * max(4 * world, 16) * BUFFER_FACTOR)
    return [
        Estimate(offloaded_cpu, 2 * params, "offload_optimizer=cpu "),
        Estimate(
            int(params * 4 * gpus * BUFFER_FACTOR),
            2 * params + int(18 * params / world),
            "offload_optimizer=none",
        ),
    ]


def estimate_zero3(
    params: int, largest_layer: int, *, gpus: int = 1, nodes: int = 1
) -> list[Estimate]:
    """DeepSpeed's `estimate_zero3_model_states_mem_needs_all_cold`, line by line.

    Args:
        params: parameters of the model.
        largest_layer: parameters of the largest module, without those of modules within it.
        gpus: GPUs of each machine.
        nodes: machines.
    """
    world = gpus * nodes
    layer = 4 * largest_layer
    # (parameters offloaded, optimizer offloaded): bytes a parameter in host memory and on the GPUs
    rows = (("cpu ", "cpu ", 18, 0), ("none", "cpu ", 16, 2), ("none", "none", 0, 18))
    estimates = []
    for offload_param, offload_optimizer, host, device in rows:
        gpu = layer + int(device * params / world)
        for zero_init in (1, 0):
            # Without zero_init every process builds the whole model in host memory first.
            if host:
                each = host / nodes if zero_init else max(4 * gpus, host / nodes)
                cpu = params * each * BUFFER_FACTOR
            else:
                cpu = (largest_layer if zero_init else params) * 4 * gpus * BUFFER_FACTOR
            options = (
                f"offload_param={offload_param}, offload_optimizer={offload_optimizer},"
                f" zero_init={zero_init}"
            )
            estimates.append(Estimate(int(cpu), gpu, options))
    return estimates


def format_estimates(
    estimates: Sequence[Estimate],
    *,
    params: int,
    largest_layer: int | None = None,
    gpus: int = 1,
    nodes: int = 1,
) -> str:
    """The table as DeepSpeed prints it; its GB are 2**30 bytes."""
    layer = "" if largest_layer is None else f", {largest_layer // 10**6}M largest layer params"
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes} {'nodes' if nodes > 1 else 'node'},"
        f" {gpus} {'GPUs' if gpus > 1 else 'GPU'} per node.",
        f"SW: Model with {params // 10**6}M total params{layer}.",
        "  per CPU  |  per GPU |   Options",
    ]
    for estimate in estimates:
        cpu, gpu = estimate.cpu / 2**30, estimate.gpu / 2**30
        lines.append(f" {cpu:7.2f}GB | {gpu:6.2f}GB | {estimate.options}")
    return "\n".join(lines)
