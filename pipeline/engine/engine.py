"""The training engine: a model, its optimizer and the collectives between processes."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pipeline.config import OptimConfig, TrainedModelConfig
from pipeline.distributed import all_reduce_
from pipeline.engine.flat import flat_groups
from pipeline.engine.lr import lr_factor
from pipeline.engine.precision import LossScaler
from pipeline.errors import ConfigError

MAX_SKIPPED = 20
"""Steps in a row without a finite gradient before training gives up."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping; not finite where the step was skipped."""

    lr: float
    """Learning rate that the step used, before any factor of a group."""

    skipped: bool
    """True where the gradient was not finite and nothing was changed."""


class NonFiniteGradientError(RuntimeError):
    """Gradients stayed infinite or NaN for many steps in a row."""


class Engine:
    """Trains one model on all processes.

    The loop calls `engine(...)` and `engine.backward(loss)` once per micro-batch, then
    `engine.step()`. Nothing else in the repository touches gradients. Gradients are summed, not
    averaged, over micro-batches and processes: losses arrive already divided by the number of
    tokens (or pairs) of the whole optimizer step, so that every token weighs the same however the
    step was cut. Weights below fp32 have fp32 masters; gradients always accumulate in fp32.
    """

    def __init__(self, model: nn.Module, config: TrainedModelConfig, *, total_steps: int) -> None:
        self.model = model
        self.optim: OptimConfig = config.optim
        self.total_steps = total_steps
        self.steps = 0
        self.skipped_in_a_row = 0
        lora_lr = config.lora.lr if config.lora is not None else None
        self.groups = flat_groups(
            model,
            lr=self.optim.lr,
            lora_lr=lora_lr if lora_lr is not None else self.optim.lr,
            weight_decay=self.optim.weight_decay,
        )
        if not self.groups:
            raise ConfigError("the model has no trained parameter; check lora.targets")
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [group.master],
                    "lr": group.settings.lr,
                    "weight_decay": group.settings.weight_decay,
                }
                for group in self.groups
            ],
            betas=self.optim.betas,
            eps=self.optim.eps,
            fused=True,
        )
        # Frozen weights count as well: gradients of fp32 adapters come through the fp16 base.
        is_fp16 = any(param.dtype == torch.float16 for param in model.parameters())
        self.scaler = LossScaler(enabled=is_fp16)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the model's forward pass."""
        return self.model(*args, **kwargs)

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Add the gradient of `loss` to what this process has accumulated."""
        if loss.requires_grad:  # a micro-batch without targets has nothing to add
            (loss * self.scaler.scale).backward()

    @torch.no_grad()
    def step(self) -> StepResult:
        """Sum gradients over processes, clip, update, zero the gradients.

        Raises:
            NonFiniteGradientError: after MAX_SKIPPED steps in a row without a finite gradient.
        """
        for group in self.groups:
            all_reduce_(group.grad)
        squared = torch.stack([group.squared_norm() for group in self.groups]).sum()
        grad_norm = squared.sqrt().item() / self.scaler.scale
        finite = grad_norm < float("inf")  # False for NaN as well
        factor = lr_factor(self.steps, total_steps=self.total_steps, optim=self.optim)
        if finite:
            self._update(grad_norm, factor)
        self.scaler.update(finite=finite)
        self.steps += 1
        self._count_skipped(finite=finite)
        for group in self.groups:
            group.grad.zero_()
        return StepResult(grad_norm=grad_norm, lr=self.optim.lr * factor, skipped=not finite)

    def discard(self) -> None:
        """Forget the accumulated gradients without a step."""
        for group in self.groups:
            group.grad.zero_()

    def _update(self, grad_norm: float, lr_share: float) -> None:
        limit = self.optim.max_grad_norm
        clip = 1.0 if limit is None else min(1.0, limit / (grad_norm + 1e-6))
        multiplier = clip / self.scaler.scale
        for group, settings in zip(self.groups, self.optimizer.param_groups, strict=True):
            if multiplier != 1.0:
                group.grad.mul_(multiplier)
            settings["lr"] = group.settings.lr * lr_share
        self.optimizer.step()
        for group in self.groups:
            group.publish()

    def _count_skipped(self, *, finite: bool) -> None:
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise NonFiniteGradientError(
                f"the gradient was infinite or NaN for {MAX_SKIPPED} steps in a row; lower the"
                " learning rate, or train with precision bf16 or fp32"
            )
