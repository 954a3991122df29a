"""The systems that `benchmarks.engine` compares, each as a function that runs one training step.

Each runs one micro-batch with the same loss, reduces the gradient, clips its norm to 1 and runs
AdamW. In bf16, all have fp32 master weights and moments, except `ddp-bf16`, which updates bf16
weights with bf16 moments: this takes less memory and time, but is numerically different.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Precision = Literal["bf16", "fp32"]
Step = Callable[[Tensor], None]

LR = 1e-4
BETAS = (0.9, 0.95)
MAX_NORM = 1.0
BUCKET_ELEMENTS = 12_500_000
"""Number of elements in DeepSpeed's buckets: 25 MB in bf16, as in DDP. The default, 1 GB, is many
times the size of the model."""

OURS = tuple(f"ours-{stage}" for stage in range(4))
DDP = ("ddp", "ddp-bf16")
FSDP2 = ("fsdp2-keep", "fsdp2-reshard")
DEEPSPEED = tuple(f"deepspeed-{stage}" for stage in range(4))
SYSTEMS = tuple(
    system
    for stage, other in enumerate((*DDP, *FSDP2))
    for system in (f"ours-{stage}", other, f"deepspeed-{stage}")
)
"""All systems in the order of a round: systems to compare run directly after each other."""


def build_model(*, tiny: bool) -> nn.Module:
    """Build a Llama with 25.3M fp32 parameters: hidden 512, 6 layers, vocabulary 12,288, tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512 if tiny else 12_288,
        hidden_size=64 if tiny else 512,
        intermediate_size=128 if tiny else 1376,
        num_hidden_layers=2 if tiny else 6,
        num_attention_heads=2 if tiny else 8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def compute_loss(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """Compute the mean next-token loss."""
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.float(), ids[:, 1:].flatten())


def make_step(system: str, model: nn.Module, precision: Precision, adam: str) -> Step:
    """Return a function that runs one training step of `model` with the named system."""
    name, _, variant = system.partition("-")
    if name == "ours":
        model = model.to(torch.bfloat16) if precision == "bf16" else model
        return engine_step(model, int(variant))
    if name == "ddp":
        return _ddp(model, precision, masters=variant != "bf16")
    if name == "fsdp2":
        return _fsdp2(model, precision, reshard=variant == "reshard")
    return _deepspeed(model, precision, stage=int(variant), adam=adam)


def engine_step(model: nn.Module, stage: Any, **offload: Any) -> Step:  # noqa: ANN401
    """Return a step of our engine at a ZeRO stage; `offload` are fields of `OffloadConfig`."""
    from pipeline.config import OptimConfig, TrainedModelConfig
    from pipeline.config.model import OffloadConfig, ZeroConfig
    from pipeline.engine.engine import Engine

    optim = OptimConfig(
        lr=LR, betas=BETAS, max_grad_norm=MAX_NORM, schedule="constant", warmup_ratio=0.0
    )
    zero = ZeroConfig(offload=OffloadConfig(**offload))
    config = TrainedModelConfig(zero_stage=stage, zero=zero, optim=optim)
    engine = Engine(model, config, total_steps=1000)
    # Average the loss: the engine sums over processes.
    share = 1 / dist.get_world_size() if dist.is_initialized() else 1.0

    def step(ids: Tensor) -> None:
        engine.backward(compute_loss(engine, ids) * share)
        engine.step()

    return step


def _ddp(model: nn.Module, precision: Precision, *, masters: bool) -> Step:
    if precision == "fp32" or not masters:
        return _ddp_without_masters(model, precision)
    fp32_params = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    return step_with_masters(_wrap_ddp(model.to(torch.bfloat16)), fp32_params)


def step_with_masters(model: nn.Module, masters: list[nn.Parameter]) -> Step:
    """Return a plain step on bf16 weights and gradients, with fp32 master weights and moments."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

    def step(ids: Tensor) -> None:
        compute_loss(model, ids).backward()
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return step


def _wrap_ddp(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    # The model's only buffers are rotary embedding constants, which need no broadcast.
    return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def _ddp_without_masters(model: nn.Module, precision: Precision) -> Step:
    if precision == "bf16":
        model.to(torch.bfloat16)
    wrapped = _wrap_ddp(model)
    return _plain_step(wrapped)


def _fsdp2(model: Any, precision: Precision, *, reshard: bool) -> Step:  # noqa: ANN401
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision == "bf16" else None)
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard}
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return _plain_step(model)


def _plain_step(model: nn.Module) -> Step:
    """Return a step that runs backward, clipping and fused AdamW on the model's parameters."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

    def step(ids: Tensor) -> None:
        compute_loss(model, ids).backward()
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed(model: nn.Module, precision: Precision, *, stage: int, adam: str) -> Step:
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only for its logs
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_NORM,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
        },
        "bf16": {"enabled": precision == "bf16"},
        "steps_per_print": 10**9,
    }
    settings: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": 0.0}
    if adam == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Any = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **settings)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(ids: Tensor) -> None:
        engine.backward(compute_loss(engine, ids))
        engine.step()

    return step
