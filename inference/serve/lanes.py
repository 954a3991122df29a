"""Batches that models generate in: one for a model and the adapters over it that share its rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from inference.engine.batch import OpenBatch, takes_slots
from inference.serve.adapters import with_adapters_by_row
from inference.serve.config import ServeConfig
from inference.serve.memory import Room
from inference.serve.models import ModelPath

CHUNK = {"cpu": 256, "cuda": 512}
"""Tokens of a pass over prompts where the settings don't say: more make it hardly faster, and hold
up those who are answered."""


@dataclass(frozen=True)
class Lane:
    """A batch, which one model generates in or several names do."""

    name: str
    """Name of the model whose slots the batch fills."""
    batch: OpenBatch
    num_slots: int
    context: int
    """Most tokens of prompt and response."""


@dataclass(frozen=True)
class Seat:
    """Where a name's responses are generated."""

    lane: Lane
    adapter: int = 0
    """Its number among the adapters of the batch, 0 for none."""


def open_lanes(
    places: Sequence[ModelPath],
    models: Mapping[str, PreTrainedModel],
    rooms: Mapping[str, Room],
    config: ServeConfig,
) -> dict[str, Seat]:
    """A batch for each model, in which rows have those of its adapters that can be mixed."""
    found: dict[str, Seat] = {}
    for place in places:
        if place.name in found:
            continue
        guests = [each.name for each in places if rooms[each.name].slots_of == place.name]
        if not takes_slots(models[place.name]):
            guests = []
        lane = _open(place.name, [models[name] for name in (place.name, *guests)], rooms, config)
        for number, name in enumerate((place.name, *guests)):
            found[name] = Seat(lane, number)
    return found


def _open(
    name: str,
    models: Sequence[PreTrainedModel],
    rooms: Mapping[str, Room],
    config: ServeConfig,
) -> Lane:
    base, *adapted = models
    model, adapters = with_adapters_by_row(base, adapted) if adapted else (base, None)
    device = torch.device(base.device)
    room = rooms[name]
    batch = OpenBatch(
        model,
        num_slots=room.slots,
        capacity=room.context,
        chunk=config.prefill_chunk or CHUNK[device.type],
        gap=config.prefill_gap,
        reuses=config.prefix_reuse != "off",
        adapters=adapters,
    )
    return Lane(name, batch, room.slots, room.context)
