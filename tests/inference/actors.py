"""A tiny trained model with its hybrid engine."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inference.generation import generate
from inference.hybrid_engine import HybridEngine
from pipeline.config import LoraConfig, OptimConfig, TrainedModelConfig
from pipeline.config.model import OffloadConfig, ZeroConfig
from pipeline.data.batches import collate
from pipeline.engine.engine import Engine
from pipeline.models.adapters.lora import add_lora
from pipeline.models.adapters.quantized import quantize_model
from pipeline.models.forward.forward import Policy, base_model
from pipeline.models.hf.export import named_weights
from pipeline.models.hf.load import load_causal_lm
from pipeline.parallel.mesh import current_mesh
from tests.families import random_rows

CPU = torch.device("cpu")
LORA = LoraConfig(rank=2, alpha=12.0)
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
BATCH = collate(random_rows((9, 4, 7)))
OFFLOADED = ZeroConfig(offload=OffloadConfig(optimizer="cpu", params="cpu"))


class Actor:
    """A model, its training engine and its hybrid engine."""

    def __init__(
        self, path: str, *, tp_size: int = 1, resident: bool = False, **changes: Any
    ) -> None:
        optim = OptimConfig(lr=0.02, schedule="constant", warmup_ratio=0.0)
        config = TrainedModelConfig(path=path, optim=optim, **changes)
        self.model: nn.Module = load_causal_lm(config, device=CPU, defer=config.zero_stage == 3)
        if config.lora is not None:
            adapted = add_lora(self.model, config.lora, task="causal", seed=0)
            self.model = quantize_model(adapted, config)
        self.engine = Engine(Policy(self.model), config, total_steps=100)
        tp_group = current_mesh().tp_group(tp_size, timeout_seconds=60.0)
        self.hybrid = HybridEngine(self.engine, self.model, tp_group=tp_group, resident=resident)

    def learn(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.engine.backward(self.engine(BATCH).logprobs.square().mean())
            self.engine.step()

    def train_after_sync(self, steps: int = 1) -> None:
        """Train after a generation, so that the replica's weights are out of date."""
        before = self.replica_logits()
        self.learn(steps)
        assert not torch.allclose(before, self.logits(), rtol=1e-3, atol=1e-3)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return the output of the trained model, adapters included."""
        with self.engine.gathered():
            return self.model(input_ids=IDS).logits

    @torch.no_grad()
    def replica_logits(self) -> Tensor:
        with self.hybrid.generating() as replica:
            return replica(input_ids=IDS).logits

    def sample(self, prompts: Sequence[Sequence[int]], keys: Sequence[int]) -> list[list[int]]:
        with self.hybrid.generating() as replica:
            responses = generate(
                replica,
                prompts,
                max_new_tokens=12,
                temperature=1.0,
                stop_ids=[3, 4, 5, 6, 7, 8, 9, 10],
                seed=1,
                keys=keys,
                batch_size=3,
            )
        return [response.ids for response in responses]

    def weights(self) -> dict[str, Tensor]:
        """Return the full, unsharded weights by name."""
        named = named_weights(base_model(self.model), self.engine)
        return {name: weight.clone() for name, weight in named}
