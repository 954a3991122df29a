"""What the models take, before any is loaded: weights, and slots of keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from inference.engine.slots import PREFILL
from inference.serve.adapter_files import changes_rows, check_adapter
from inference.serve.config import ServeConfig
from inference.serve.models import ModelPath
from pipeline.budget.fit import in_words
from pipeline.budget.machine import GIB
from pipeline.config import FrozenModelConfig
from pipeline.errors import ConfigError, require
from pipeline.models.attention import KEY_BLOCK, round_up
from pipeline.models.forward import context_length, kv_bytes_per_token, num_key_heads
from pipeline.models.meta import model_on_meta

MOST_CONTEXT = 8192
"""Tokens of a sequence, where the settings don't say."""

MOST_SLOTS = 32
"""Sequences that run at once, where the settings don't say."""


@dataclass(frozen=True)
class Room:
    """Memory that a model is given: its weights, and slots of keys and values."""

    weight_bytes: int
    slots: int
    context: int
    cache_bytes: int
    slots_of: str | None = None
    """The model in whose slots it generates; None has slots of its own."""

    @property
    def words(self) -> str:
        """The room in words, for the line that the server logs when it starts."""
        if self.slots_of is not None:
            return f"{in_words(self.weight_bytes)[0]} of weights, in the slots of {self.slots_of}"
        weights, cache = in_words(self.weight_bytes), in_words(self.cache_bytes)
        return (
            f"{weights[0]} of weights, {self.slots} slots of {self.context:,} tokens"
            f" ({cache[0]} of keys and values)"
        )


def plan_memory(
    places: Sequence[ModelPath], reward: str | None, config: ServeConfig
) -> dict[str, Room]:
    """Number and length of each model's slots.

    Raises:
        ConfigError: the weights don't fit, or not one sequence does.
        ModelError: a model has no configuration to read, or an adapter is of another model.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = {place.name: _on_meta(place.path, config, device) for place in places}
    weights = {place.name: _weights(place, models[place.name]) for place in places}
    total = sum(weights.values())
    if reward is not None:
        total += _bytes(_on_meta(reward, config, device, scores=True))
    free = _free_bytes(device)
    if total > free:
        needed, there = in_words(total, free)
        raise ConfigError(
            f"the weights of {len(models) + (reward is not None)} models take {needed}, and"
            f" {there} are free; serve fewer of them, or set --precision bf16"
        )
    budget = (free - total) // 2 if config.cache_gib is None else int(config.cache_gib * GIB)
    guests = {
        place.name: place.base
        for place in places
        if place.adapter is not None and changes_rows(place.adapter, models[place.name])
    }
    each = budget // max(1, len(models) - len(guests))
    rooms = {
        name: _room(name, cast("PreTrainedModel", model), weights[name], each, config)
        for name, model in models.items()
        if name not in guests
    }
    for name, base in guests.items():
        assert base is not None
        rooms[name] = replace(rooms[base], weight_bytes=weights[name], cache_bytes=0, slots_of=base)
    return rooms


def _room(
    name: str, model: PreTrainedModel, weight_bytes: int, budget: int, config: ServeConfig
) -> Room:
    limit = context_length(model)
    require(
        config.context is None or config.context <= limit,
        f"--context is {config.context}, and {name} reads {limit} tokens; lower it",
    )
    context = min(limit, config.context or MOST_CONTEXT)
    per_token = kv_bytes_per_token(model, key_heads=num_key_heads(model))
    if config.context is None:  # a shorter one rather than none
        context = max(min(context, budget // per_token - 2 * KEY_BLOCK), min(context, PREFILL // 8))
    slot = per_token * (round_up(context, KEY_BLOCK) + KEY_BLOCK)
    slots = config.slots or min(MOST_SLOTS, budget // slot)
    if slots * slot > budget or slots < 1:
        needed, there = in_words(max(1, slots) * slot, budget)
        raise ConfigError(
            f"the keys and values of {name} take {needed} in {max(1, slots)} slots of"
            f" {context:,} tokens, and {there} are free for them; lower --slots or --context, or"
            " serve fewer models"
        )
    return Room(weight_bytes, slots, context, slots * slot)


def _on_meta(
    path: str, config: ServeConfig, device: torch.device, *, scores: bool = False
) -> nn.Module:
    settings = FrozenModelConfig(path=path, precision=config.precision)
    return model_on_meta(settings, task="classifier" if scores else "causal", device=device)


def _weights(place: ModelPath, model: nn.Module) -> int:
    """Bytes that a model adds: an adapter's are its own alone."""
    if place.adapter is None:
        return _bytes(model)
    return check_adapter(place.adapter, place.name, model, place.path)


def _bytes(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
