"""Tiny tensor-parallel models, and their results for a few tokens."""

from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.config import LoraConfig, TrainedModelConfig
from pipeline.data.batches import collate
from pipeline.engine.engine import Engine
from pipeline.engine.sharding.tensor_parallel import get_role, get_shard
from pipeline.models.adapters.lora import add_lora
from pipeline.models.forward.forward import Policy
from pipeline.models.forward.packing import detect_batching
from pipeline.models.forward.vocab_parallel import LARGE, get_vocab_shard
from pipeline.models.parallel.tensor_parallel import shard_layers
from pipeline.parallel.mesh import Mesh, current_mesh
from pipeline.system.position import POSITION
from tests.families import FAMILIES, VOCAB, random_rows, tiny_causal_lm
from tests.pipeline.engine.inspection import get_gradients

WITHOUT_PLAN = ("falcon", "gptj", "gpt_neo", "bloom")

ONE_KEY_HEAD = {"num_key_value_heads": 1, "tie_word_embeddings": True}
ATTENTION_PLAN = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
ATTENTION_PLAN["layers.*.self_attn.o_proj"] = "rowwise"

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES if family not in WITHOUT_PLAN},
    "llama, one key head": ("llama", ONE_KEY_HEAD),
    "llama, replicated MLP, LoRA": (
        "llama",
        {**ONE_KEY_HEAD, "base_model_tp_plan": ATTENTION_PLAN},
    ),
    "llama, large vocab": ("llama", {"vocab_size": LARGE}),
    "gpt2, LoRA": ("gpt2", {}),
    "gpt2, large vocab, tied": ("gpt2", {"vocab_size": LARGE}),
    "gemma2, large vocab, capped": ("gemma2", {"vocab_size": LARGE, "tie_word_embeddings": False}),
}
"""Families and their settings; those named LoRA train adapters of all linear layers."""


def add_random_adapters(model: PreTrainedModel) -> PeftModel:
    """Return the model with random adapters."""
    trained = add_lora(model, LoraConfig(rank=4, alpha=8.0), task="causal", seed=0)
    generator = torch.Generator().manual_seed(0)
    for param in trained.parameters():
        if param.requires_grad:
            param.data += 0.02 * torch.randn(param.shape, generator=generator)
    return trained


def compute_results(
    variant: str, mesh: Mesh | None = None, *, sequence: bool = True
) -> dict[str, Any]:
    """Return full gradients, their norm, parameters by role, the loss and the sum of logits."""
    family, changes = VARIANTS[variant]
    model = tiny_causal_lm(family, **changes)
    if detect_batching(model).packed:
        model.set_attn_implementation("ragged")
    trained = add_random_adapters(model) if "LoRA" in variant else model
    mesh = mesh or current_mesh()
    shard_layers(trained, mesh.tensor, sequence=sequence)
    is_large = mesh.tensor.size > 1 and model.config.vocab_size >= LARGE
    assert (get_vocab_shard(model.get_output_embeddings()) is not None) == is_large
    engine = Engine(
        Policy(trained),
        TrainedModelConfig(),
        total_steps=1,
        group=mesh.data,
        model_parallel=mesh.model_parallel,
        tensor=mesh.tensor,
    )
    rows = random_rows((9, 14, 6))
    scaled = [
        [token * (model.config.vocab_size // VOCAB) for token in row.input_ids] for row in rows
    ]
    batch = collate([replace(row, input_ids=ids) for row, ids in zip(rows, scaled, strict=True)])
    outputs = engine(batch, temperature=0.7, entropy=True)
    loss = -outputs.logprobs.sum() - 0.1 * outputs.entropy.sum()
    engine.backward(loss)
    params = dict(engine.model.named_parameters())
    gradients: dict[str, Tensor] = {}
    for name, gradient in get_gradients(engine).items():
        shard = get_shard(params[name])
        shards = engine.tensor.all_gather(gradient, label="a test")
        gradients[name] = gradient if shard is None else shard.join(shards)
    roles: dict[str, set[str]] = {}
    for name, param in params.items():
        roles.setdefault(get_role(param), set()).add(name.split(".")[-2])
    logits = Policy(trained).eval().logits(batch).sum().item()
    shared = [x for x in engine.groups if x.flat.settings.role in ("partial", "overlapping")]
    before = POSITION.number
    norm = engine.step().grad_norm
    labels = [entry.unit for entry in POSITION.recent if entry.number > before]
    num_sums = labels.count("gradients of shared weights")
    scalars = {"norm": norm, "loss": loss.item(), "logits": logits}
    scalars["sums_per_vector"] = num_sums / max(1, len(shared))
    return {"gradients": gradients, "roles": roles, **scalars}
