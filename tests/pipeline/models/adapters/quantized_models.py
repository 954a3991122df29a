"""Tiny models with adapters on a base in 4 or 8 bits."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.config import LoraConfig, OptimConfig, TrainedModelConfig
from pipeline.data.batches import collate
from pipeline.demo.model import VOCABULARY, build_tokenizer
from pipeline.engine.engine import Engine
from pipeline.models.adapters.quantized import QuantizedLinear
from pipeline.models.forward.forward import Policy, base_model
from pipeline.models.trained import prepare_causal_lm
from tests.distributed import rank, world_size
from tests.families import random_rows, save_to, tiny_causal_lm

CPU = torch.device("cpu")
BATCH = collate(random_rows((9, 4, 7)))
MICRO_BATCHES = (BATCH, collate(random_rows((3, 8))))
IDS = torch.tensor([[5, 6, 7, 8, 9]])
NF4: dict[str, Any] = {"quantize": "nf4"}
QUANTIZATIONS: list[dict[str, Any]] = [NF4, {"quantize": "int8"}]


def settings(path: str, **changes: Any) -> TrainedModelConfig:
    optim = OptimConfig(lr=0.02, schedule="constant", warmup_ratio=0.0, weight_decay=0.1)
    lora = LoraConfig(rank=4, alpha=8.0, lr=0.02)
    return TrainedModelConfig(path=path, **{"optim": optim, "lora": lora, **changes})


def save_base(family: str, directory: Path, **changes: Any) -> str:
    return save_to(tiny_causal_lm(family, vocab_size=VOCABULARY, **changes), directory)


def train(config: TrainedModelConfig, *, steps: int = 3) -> tuple[nn.Module, Engine]:
    """Return a model trained for a few steps on two micro-batches that the ranks share."""
    model = prepare_causal_lm(config, build_tokenizer(), device=CPU, seed=0)
    engine = Engine(Policy(model), config, total_steps=steps)
    for _ in range(steps):
        for batch in MICRO_BATCHES[rank() :: world_size()]:
            engine.backward(engine(batch).logprobs.square().mean())
        engine.step()
    return model, engine


def get_module(model: nn.Module, name: str) -> Any:
    return base_model(model).get_submodule(name)


def get_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    named = base_model(model).named_modules()
    return {name: module for name, module in named if isinstance(module, QuantizedLinear)}


def plain_names(model: nn.Module) -> set[str]:
    return {name.removesuffix(".base_layer") for name in get_layers(model)}
