"""Settings of the engine: placement of states, and reduction of gradients."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """States that leave the device between uses: less memory, less speed.

    On CPUs it changes no bit of the result. On a GPU an offloaded optimizer runs on the host, whose
    kernel rounds otherwise; gradients and weights come back as they went.
    """

    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Place of master weights and moments, and of their update (offload_optimizer): none is the
    device, cpu is host memory, nvme is files in `nvme_path`, read and written unit by unit."""

    gradients: Literal["none", "cpu"] = "none"
    """Place of reduced gradients until the optimizer step."""

    params: Literal["none", "cpu", "nvme"] = "none"
    """Place of this process's shard of the weights between uses (offload_param); needs
    `zero_stage` 3."""

    nvme_path: Path | None = None
    """Directory on a fast local disk for what is offloaded to nvme; its space is reserved at the
    start."""

    pin_memory: bool = True
    """Offload to page-locked host memory: copies overlap with compute, but it can't be swapped."""

    def __post_init__(self) -> None:
        places = {"optimizer": self.optimizer, "params": self.params}
        on_disk = [name for name, place in places.items() if place == "nvme"]
        require(
            not on_disk or self.nvme_path is not None,
            f"offload.{'/'.join(on_disk)} nvme needs offload.nvme_path, a directory on a fast local"
            " disk",
        )

    def check(self, stage: int) -> None:
        """Raise unless ZeRO stage `stage` can offload this way.

        Raises:
            ConfigError: weights are offloaded that every process needs whole.
        """
        require(
            self.params == "none" or stage == 3,
            f"zero.offload.params {self.params} needs zero_stage 3, got {stage}; below it, every"
            " process keeps the whole weights on its device",
        )


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """How the engine shares a model out among processes."""

    offload: OffloadConfig = field(default_factory=OffloadConfig)

    reduction: Literal["fast", "deterministic"] = "fast"
    """How gradients are summed: fast leaves the order to the collective; deterministic sums
    micro-batches in a fixed tree, so that the number of processes, a power of two, changes no bit.
    Steps 1 and 2 then cut micro-batches of at most `micro_batch_size` for any number."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """How gradients travel between processes to be summed: bf16 halves the bytes and rounds each;
    gloo, and NCCL with reduction deterministic, then add in fp32, NCCL otherwise in bf16. Within
    the memory of one machine nothing is rounded."""

    prefetch_units: int = 1
    """Units whose weights are gathered ahead of their use, at stage 3; 0 gathers on demand."""

    shared_memory: bool = True
    """CPU processes of one machine read each other's memory; false sends everything through the
    process group, as between machines."""

    max_skipped_steps: int = 20
    """Training stops after that many steps in a row without a finite gradient."""

    unit_classes: tuple[str, ...] = ()
    """Class names of the modules that are gathered and reduced as one unit; empty takes the
    transformer blocks."""

    def __post_init__(self) -> None:
        require(
            self.prefetch_units >= 0,
            f"zero.prefetch_units must not be below 0, got {self.prefetch_units}",
        )
        require(
            self.max_skipped_steps > 0,
            f"zero.max_skipped_steps must be above 0, got {self.max_skipped_steps}",
        )
        require(
            all(name.isidentifier() for name in self.unit_classes),
            "zero.unit_classes takes class names such as LlamaDecoderLayer, got"
            f" {' '.join(self.unit_classes)}",
        )
