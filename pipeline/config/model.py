"""Settings of models: source, data type, training, placement of states."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.config.optim import DEFAULT_OPTIM, LossScaleConfig, OptimConfig
from pipeline.system.errors import require


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where states are stored between uses; offloading saves device memory but is slower.

    On CPUs, results are bitwise identical. On a GPU an offloaded optimizer runs on the host, whose
    kernel rounds differently; offloading gradients and weights doesn't change their bits.
    """

    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where master weights and moments are stored and updated (offload_optimizer): none is the
    device, cpu is host memory, nvme is files in `nvme_path`, read and written unit by unit."""

    gradients: Literal["none", "cpu"] = "none"
    """Where reduced gradients are stored until the optimizer step."""

    params: Literal["none", "cpu", "nvme"] = "none"
    """Where this process's shard of the weights is stored between uses (offload_param); needs
    `zero_stage` 3."""

    nvme_path: Path | None = None
    """Directory on a fast local disk for tensors offloaded to nvme; allocated at startup."""

    def __post_init__(self) -> None:
        devices = {"optimizer": self.optimizer, "params": self.params}
        on_disk = [name for name, device in devices.items() if device == "nvme"]
        require(
            not on_disk or self.nvme_path is not None,
            f"offload.{'/'.join(on_disk)} nvme needs offload.nvme_path, a directory on a fast local"
            " disk",
        )


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """How the engine shards a model over processes."""

    offload: OffloadConfig = field(default_factory=OffloadConfig)

    reduction: Literal["fast", "deterministic"] = "fast"
    """How gradients are summed: fast leaves the order to the collective; deterministic sums
    micro-batches in a fixed tree, so that results are bit-identical for any number of processes
    that is a power of two. In steps 1 and 2 the micro-batches, of at most `micro_batch_size`, are
    then the same for any such number."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type in which gradients are sent between processes: bf16 halves the traffic and rounds
    each gradient; the sums are then in bf16 with NCCL, but in fp32 with gloo or a deterministic
    reduction."""

    max_skipped_steps: int = 20
    """Training stops after this number of consecutive steps without a finite gradient."""

    def __post_init__(self) -> None:
        require(
            self.max_skipped_steps > 0,
            f"zero.max_skipped_steps must be positive, got {self.max_skipped_steps}",
        )


Precision = Literal["auto", "fp32", "bf16", "fp16"]
Kernels = Literal["auto", "required", "off"]
Quantize = Literal["none", "nf4", "int8"]
AdapterVariant = Literal["lora", "rslora"]

LORA_LR_FACTOR = 10.0
"""Learning rate of adapters relative to full fine-tuning, whose best rates are about ten times
lower (Schulman et al. 2025, "LoRA Without Regret"; Biderman et al. 2024, section 6)."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021), through peft."""

    rank: int = 16
    """Rank r of the update B @ A (lora_dim)."""

    alpha: float = 32.0
    """The update is scaled by alpha / rank, or as the variant specifies."""

    variant: AdapterVariant = "lora"
    """rslora scales the update by alpha / sqrt(rank), for ranks of 64 or more (use_rslora)."""

    dropout: float = 0.0
    """Dropout on the adapter's input; 0 in step 3, where it would break the policy ratio."""

    targets: tuple[str, ...] = ("all-linear",)
    """Names of the modules that get an adapter, as peft's target_modules (lora_module_name)."""

    lr: float | None = None
    """Learning rate of the adapters (lora_learning_rate), as set by train.py's --lr; null uses 10
    times `optim.lr`, the rate of full fine-tuning."""

    def __post_init__(self) -> None:
        require(self.rank > 0, f"lora.rank must be positive, got {self.rank}")
        require(self.alpha > 0, f"lora.alpha must be positive, got {self.alpha}")
        require(0 <= self.dropout < 1, f"lora.dropout must be in [0, 1), got {self.dropout}")
        require(bool(self.targets), 'lora.targets must name a module, or "all-linear"')
        require(self.lr is None or self.lr > 0, f"lora.lr must be positive or null, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class FrozenModelConfig:
    """A model that is not trained."""

    path: str | None = None
    """Hugging Face model id or local directory; null uses the previous step's output."""

    precision: Precision = "auto"
    """Data type of the weights (dtype); auto is bf16 on a GPU that supports it, else fp32. On a
    CPU bf16 trains faster only if the processor has instructions for it (AVX512-BF16, AMX)."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    allow_pickle: bool = False
    """Load weights that are only available as a pickle (pytorch_model.bin), which may run code.
    Only for sources you trust; the Hub has older models as safetensors too."""

    quantize: Quantize = "none"
    """Storage of the frozen linear weights of the blocks: nf4 takes 4.5 bits per weight (QLoRA,
    load_in_4bit), int8 8.5 bits, and none keeps them as loaded. A trained model needs lora for
    this. Embeddings, norms and heads are not quantized."""


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig(FrozenModelConfig):
    """A trained model: its initial weights, and how it is trained."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """Sharded in addition to gradients: 0 nothing, 1 or 2 optimizer state, 3 also weights."""

    zero: ZeroConfig = field(default_factory=ZeroConfig)

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    fp32_head: bool = False
    """Compute the logits of bf16 or fp16 policies in fp32, in training and generation, so that both
    agree better (docs/generation.md); scores of critics and reward models are always fp32."""

    lora: LoraConfig | None = None
    """Train adapters only; null trains all weights."""

    fp16: LossScaleConfig = field(default_factory=LossScaleConfig)

    optim: OptimConfig = field(default_factory=lambda: DEFAULT_OPTIM)

    kernels: Kernels = "auto"
    """This project's kernels (docs/kernels.md): auto uses those that can be built on this machine,
    required stops the run if one is missing, off uses PyTorch. They affect memory and speed, and
    the rounding of attention in bf16 on a CPU."""

    @property
    def peak_lr(self) -> tuple[str, float]:
        """Name and value of the peak learning rate's setting: `lora.lr` if there are adapters."""
        if self.lora is None:
            return "optim.lr", self.optim.lr
        return "lora.lr", self.lora.lr or LORA_LR_FACTOR * self.optim.lr

    def __post_init__(self) -> None:
        offload = self.zero.offload
        require(
            offload.params == "none" or self.zero_stage == 3,
            f"zero.offload.params {offload.params} needs zero_stage 3, got {self.zero_stage}; at"
            " lower stages, every process keeps the full weights on its device",
        )
        require(
            self.quantize == "none" or self.lora is not None,
            f"quantize {self.quantize} freezes the base, which leaves nothing to train: add"
            " adapters with lora.rank 16, or set quantize to none to train all weights",
        )
