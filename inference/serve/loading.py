"""Plans the memory of everything that is served, then loads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.engine.batch import OpenBatch, takes_slots
from inference.engine.cache import slot_bytes
from inference.serve.adapters import with_adapter, with_adapters_by_row
from inference.serve.broker import Broker
from inference.serve.config import ServeConfig
from inference.serve.metrics import Metrics
from inference.serve.models import (
    MERGE,
    ModelPath,
    check_adapter,
    tokenizer_directory,
    trained_on,
)
from inference.serve.served import Lane, ServedModel, load_reward, vocabulary_of
from inference.serve.state import State
from inference.serve.text import TokenBytes
from inference.weights.hash import weights_hash
from pipeline.budget.machine import GIB, in_words
from pipeline.cli import remark
from pipeline.config import FrozenModelConfig
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.errors import ConfigError, ModelError, require
from pipeline.models.chat import check_ready
from pipeline.models.forward import context_length
from pipeline.models.load import lacks_tokens, load_causal_lm, load_tokenizer
from pipeline.models.lora import Task
from pipeline.models.meta import model_on_meta
from pipeline.parallel.device import local_device

MOST_CONTEXT = 8192
"""Tokens of a sequence without `--context`."""

LEAST_CONTEXT = 256
"""Tokens of a sequence that memory must suffice for without `--context`."""

MOST_SLOTS = 32
"""Sequences that run at once without `--slots`."""

CHUNK = {"cpu": 64, "cuda": 512}
"""Prompt tokens of a step without `--prefill-chunk`."""


@dataclass(frozen=True)
class Room:
    """Memory of a model: its weights, and slots of keys and values; an adapter has no slots."""

    weight_bytes: int
    slots: int
    context: int
    cache_bytes: int

    @property
    def words(self) -> str:
        """The room in words, for the log."""
        weights = f"{in_words(self.weight_bytes)[0]} of weights"
        if not self.slots:
            return weights
        return (
            f"{weights}, {self.slots} slots of {self.context:,} tokens"
            f" ({in_words(self.cache_bytes)[0]} of keys and values)"
        )


def load(
    config: ServeConfig, places: Sequence[ModelPath], reward: str | None, keys: Mapping[str, str]
) -> State:
    """Load the models, and return the state of a server that is about to begin.

    Raises:
        UserError: there is no such model, or no room for it.
    """
    places = _ready(places)
    if reward is not None:
        check_ready(reward, scores=True)
    rooms = plan_memory(places, reward, config)
    state = State(config=config, keys=keys, metrics=Metrics(), broker=Broker(config))
    if reward is not None:
        state.reward = load_reward(reward)
        remark(f"reward: {reward}")
    models: dict[str, PreTrainedModel] = {}
    for place in places:
        remark(f"{place.name}: {_describe(place)}, {rooms[place.name].words}")
        models[place.name] = _load_model(place, config, models)
    lanes: dict[str, Lane] = {}
    for place in places:
        if place.adapter is not None:
            continue
        guests = [guest.name for guest in places if guest.base == place.name]
        lane = lanes[place.name] = _open_lane(place.name, guests, models, rooms, config)
        state.metrics.serves(place.name, lane.num_slots)
    for place in places:
        state.models[place.name] = _serve(
            place, models[place.name], lanes[place.base or place.name]
        )
    return state


def _ready(places: Sequence[ModelPath]) -> list[ModelPath]:
    """The models that can be loaded: all but the one that a run began from, if it is gone.

    A run may be moved to another machine, and finished models outlive their origins.
    """
    found: list[ModelPath] = []
    needed = {place.base for place in places}
    for place in places:
        try:
            if place.adapter is None:
                check_ready(place.path)
        except ModelError as error:
            if not place.begins_run or place.name in needed:
                raise
            remark(f"{place.name} is left out, the model that the run began from: {error}")
        else:
            found.append(place)
    return found


def _describe(place: ModelPath) -> str:
    """The path of a model; of an adapter also a base that it was not trained on by name."""
    if place.adapter is None:
        return place.path
    words = f"the adapter {place.adapter} over {place.base}"
    base = trained_on(place.adapter)
    if base in (None, place.path) or Path(base).resolve() == Path(place.path).resolve():
        return words
    return f"{words}, though it names {base} as its model"


def plan_memory(
    places: Sequence[ModelPath], reward: str | None, config: ServeConfig
) -> dict[str, Room]:
    """Number and length of each model's slots.

    Raises:
        ConfigError: the weights don't fit, or not one sequence does.
        ModelError: a model has no configuration to read, or an adapter doesn't fit.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = {place.name: _on_meta(place.path, config, device) for place in places}
    weights = {
        place.name: _num_bytes(models[place.name])
        if place.adapter is None
        else check_adapter(place, models[place.name])
        for place in places
    }
    total = sum(weights.values())
    if reward is not None:
        total += _num_bytes(_on_meta(reward, config, device, task="classifier"))
    free = psutil.virtual_memory().available
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    if total > free:
        needed, available = in_words(total, free)
        raise ConfigError(
            f"the weights of {len(models) + (reward is not None)} models take {needed}, and"
            f" {available} are free; serve fewer of them, or set --precision bf16"
        )
    budget = (free - total) // 2 if config.cache_gib is None else int(config.cache_gib * GIB)
    share = budget // max(1, sum(place.adapter is None for place in places))
    return {
        place.name: _room(place.name, models[place.name], weights[place.name], share, config)
        if place.adapter is None
        else Room(weights[place.name], 0, 0, 0)
        for place in places
    }


def _room(
    name: str, model: PreTrainedModel, weight_bytes: int, budget: int, config: ServeConfig
) -> Room:
    limit = context_length(model)
    require(
        config.context is None or config.context <= limit,
        f"--context is {config.context}, and {name} reads {limit} tokens; lower it",
    )
    context = min(limit, config.context or MOST_CONTEXT)
    if config.context is None:  # a shorter one rather than none
        while context > LEAST_CONTEXT and slot_bytes(model, context) > budget:
            context = max(LEAST_CONTEXT, context // 2)
    slot = slot_bytes(model, context)
    slots = config.slots or max(1, min(MOST_SLOTS, budget // slot))
    if slots * slot > budget:
        needed, available = in_words(slots * slot, budget)
        raise ConfigError(
            f"the keys and values of {name} take {needed} in {slots} slots of {context:,} tokens,"
            f" and {available} are free for them; lower --slots or --context, or serve fewer models"
        )
    return Room(weight_bytes, slots, context, slots * slot)


def _on_meta(
    path: str, config: ServeConfig, device: torch.device, *, task: Task = "causal"
) -> PreTrainedModel:
    settings = FrozenModelConfig(path=path, precision=config.precision)
    return cast("PreTrainedModel", model_on_meta(settings, task=task, device=device))


def _num_bytes(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def _load_model(
    place: ModelPath, config: ServeConfig, models: Mapping[str, PreTrainedModel]
) -> PreTrainedModel:
    if place.adapter is not None and place.base is not None:
        base = models[place.base]
        if not takes_slots(base):
            raise ModelError(
                f"the adapter {place.name} is over {place.base}, whose kind of attention takes no"
                f" adapters by row; {MERGE}"
            )
        return with_adapter(base, place.adapter)
    settings = FrozenModelConfig(path=place.path, precision=config.precision)
    model = load_causal_lm(settings, device=local_device(), seed=place.seed)
    return model.requires_grad_(requires_grad=False)


def _open_lane(
    name: str,
    guests: Sequence[str],
    models: Mapping[str, PreTrainedModel],
    rooms: Mapping[str, Room],
    config: ServeConfig,
) -> Lane:
    """The batch of a model, whose rows may have the adapters over it."""
    model, adapters = models[name], None
    if guests:
        model, adapters = with_adapters_by_row(model, [models[guest] for guest in guests])
    room = rooms[name]
    batch = OpenBatch(
        model,
        num_slots=room.slots,
        capacity=room.context,
        chunk=config.prefill_chunk or CHUNK[model.device.type],
        reuses=config.prefix_reuse != "off",
        adapters=adapters,
    )
    return Lane(name, batch, room.slots, room.context, (name, *guests))


def _serve(place: ModelPath, model: PreTrainedModel, lane: Lane) -> ServedModel:
    """Raise ModelError if its tokenizer is missing or has tokens that the model lacks."""
    tokenizer = _tokenizer(place)
    if place.adapter is not None and lacks_tokens(model, tokenizer):
        raise ModelError(
            f"the adapter {place.name} has a tokenizer of {len(tokenizer)} tokens in its directory,"
            f" and {place.base} has {vocabulary_of(model)}; give the model that it was trained on"
            " as --path"
        )
    return ServedModel(
        name=place.name,
        base=place.base,
        model=model,
        tokenizer=tokenizer,
        chat=resolve_format(tokenizer, "auto"),
        lane=lane,
        weights_hash=f"{weights_hash(model):013x}",
        bytes_of=TokenBytes(tokenizer),
    )


def _tokenizer(place: ModelPath) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or the one in the adapter's directory.

    A base model without a chat template takes the tokenizer of the step that trained it, if it has
    the same tokens, so that both models are given the same text.
    """
    if place.adapter is not None and (directory := tokenizer_directory(place.adapter)):
        return load_tokenizer(FrozenModelConfig(path=directory))
    tokenizer = load_tokenizer(FrozenModelConfig(path=place.path))
    if place.format_of is None or tokenizer.chat_template:
        return tokenizer
    trained = load_tokenizer(FrozenModelConfig(path=place.format_of))
    return trained if trained.get_vocab() == tokenizer.get_vocab() else tokenizer
