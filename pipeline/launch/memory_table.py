"""How many bytes the models of a step hold on each process, counted without loading them.

A model that trains holds weights, fp32 gradients and Adam's two fp32 moments, 16 bytes a parameter,
and where its weights are 16-bit fp32 masters besides, 18 bytes. One that only answers holds its
weights.
Activations and the KV cache come on top; they grow with micro-batch and length.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.config import (
    EMBEDDED,
    FrozenModelConfig,
    LoraConfig,
    StepConfig,
    TrainedModelConfig,
)

EMBEDDED_PARAMETERS = 930_000

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name to its shape."""


@dataclass(frozen=True)
class Row:
    """The memory of one model in one step, in bytes on each process."""

    role: str
    path: str

    parameters: int | None
    """None: not known without downloading the model."""

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    moments: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.masters + self.moments


def memory_rows(config: StepConfig, origins: Mapping[str, str], *, gpus: int) -> list[Row]:
    """One row for each model of the step.

    Args:
        config: the step's settings.
        origins: for a directory that an earlier step has yet to fill, the model it starts from.
        gpus: GPUs of this machine; `auto` precision is taken as bf16 where there are any.
    """
    rows = []
    for field in fields(config):
        model = getattr(config, field.name)
        if not isinstance(model, FrozenModelConfig):
            continue
        path = model.path or _stands_in(config, field.name)
        if path is None:
            continue
        shapes = parameter_shapes(path, origins)
        rows.append(_row(field.name, path, model, shapes, gpus=gpus))
    return rows


def parameter_shapes(path: str, origins: Mapping[str, str]) -> Shapes | None:
    """The shapes of a model's parameters, or None where only its name is known.

    Read from the headers of its safetensors files, else worked out from its config.json.
    """
    if path == EMBEDDED:
        return {"all": (EMBEDDED_PARAMETERS,)}
    directory = Path(path).expanduser()
    if not (directory / "config.json").is_file():
        if path in origins:
            return parameter_shapes(origins[path], origins)
        cached = _cached(path)
        if cached is None:
            return None
        directory = cached
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return dict(shape for file in files for shape in _header(file))
    return _from_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))


def _row(
    role: str, path: str, model: FrozenModelConfig, shapes: Shapes | None, *, gpus: int
) -> Row:
    if shapes is None:
        return Row(role, path, None)
    parameters = sum(_size(shape) for shape in shapes.values())
    width = {"fp32": 4, "auto": 2 if gpus else 4}.get(model.precision, 2)
    if not isinstance(model, TrainedModelConfig):
        return Row(role, path, parameters, weights=parameters * width)
    adapters = _adapter_parameters(shapes, model.lora) if model.lora else 0
    trained = adapters or parameters
    return Row(
        role,
        path,
        parameters,
        weights=parameters * width + adapters * 4,  # adapters are fp32
        gradients=trained * 4,
        masters=trained * 4 if width == 2 and not adapters else 0,
        moments=trained * 8,
    )


def _stands_in(config: StepConfig, role: str) -> str | None:
    """The reference is a copy of the actor, except where the actor trains adapters only."""
    actor = getattr(config, "actor", None)
    if role != "reference" or not isinstance(actor, TrainedModelConfig) or actor.lora:
        return None
    return actor.path


def _adapter_parameters(shapes: Shapes, lora: LoraConfig) -> int:
    """Parameters of A and B on every matrix that `targets` names."""
    every = "all-linear" in lora.targets
    return sum(
        lora.rank * sum(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and (_is_linear(name) if every else name.split(".")[-2] in lora.targets)
    )


def _is_linear(name: str) -> bool:
    return not any(word in name for word in ("embed", "wte", "wpe", "lm_head", "score"))


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in a safetensors file: 8 bytes of length, then JSON, then the tensors."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, tuple(tensor["shape"])


def _cached(name: str) -> Path | None:
    """The directory of a Hub model that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def _from_config(config: Mapping[str, Any]) -> Shapes | None:
    """Shapes of the large matrices of a decoder with these sizes; norms and biases are left out."""
    hidden = config.get("hidden_size", config.get("n_embd"))
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    vocabulary = config.get("vocab_size")
    if not (hidden and layers and vocabulary):
        return None
    heads = config.get("num_attention_heads", config.get("n_head", 1))
    head = config.get("head_dim") or hidden // heads
    key_value = head * (config.get("num_key_value_heads") or heads)
    inner = next(
        (config[name] for name in ("intermediate_size", "ffn_dim", "n_inner") if config.get(name)),
        4 * hidden,
    )
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocabulary, hidden)}
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if positions and "rope_theta" not in config and "rope_parameters" not in config:
        shapes["embed_positions.weight"] = (positions, hidden)
    if config.get("tie_word_embeddings") is False:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    gated = config.get("hidden_act") in ("silu", "swiglu", "gelu_pytorch_tanh")
    for layer in range(layers):
        matrices = {
            "q_proj": (head * heads, hidden),
            "k_proj": (key_value, hidden),
            "v_proj": (key_value, hidden),
            "o_proj": (hidden, head * heads),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        if gated:
            matrices["gate_proj"] = (inner, hidden)
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
    return shapes
