"""What lies there through a whole phase: weights, masters, moments and copies of them."""

from collections.abc import Iterator, Mapping

import torch

from pipeline.budget.machine import Machine
from pipeline.budget.models import CountedModel
from pipeline.budget.table import Item, Place
from pipeline.config import Workload
from pipeline.engine.predict import KINDS, moment_bytes, offloaded, predict, streamed

PLACES: Mapping[str, Place] = {"cpu": "host", "nvme": "disk"}


def device_of(machine: Machine) -> torch.device:
    """What models compute on there."""
    return torch.device("cuda" if machine.has_gpu else "cpu")


def engine_bytes(model: CountedModel, workload: Workload, machine: Machine) -> Mapping[str, int]:
    """Bytes of a process by the kinds of `pipeline.engine.predict`."""
    if model.engine is None:
        return dict.fromkeys(KINDS, 0) | {"weights": model.weight_bytes}
    sizes = predict(
        model.present,
        model.engine,
        world=workload.shards,
        replicas=workload.parallel.replicas,
        device=device_of(machine),
        micro_batches=workload.passes(model.role),
    )
    kept = KINDS if model.trained is not None else ("weights", "gathered")
    return dict.fromkeys(KINDS, 0) | {kind: sizes[kind] for kind in kept}


def sums_directly(model: CountedModel, workload: Workload, machine: Machine) -> bool:
    """Whether the first pass of an optimizer step writes its gradients into the sums themselves."""
    assert model.engine is not None
    sizes = predict(
        model.present,
        model.engine,
        world=workload.shards,
        device=device_of(machine),
        micro_batches=1,
    )
    return sizes["gradient_buffers"] == 0


def places_of(model: CountedModel, machine: Machine) -> Mapping[str, Place]:
    """The place of each kind that does not lie where the model computes."""
    if model.engine is None:
        return {}
    away = offloaded(model.engine, device_of(machine))
    return {kind: PLACES[place] for kind, place in away.items()}


def held(
    model: CountedModel,
    sizes: Mapping[str, int],
    workload: Workload,
    machine: Machine,
    *,
    kinds: tuple[str, ...],
    moved: frozenset[str],
) -> Iterator[Item]:
    """Items of a model that stay; those of the `moved` kinds in main memory for a while.

    `sizes` are its `engine_bytes`.
    """
    places = places_of(model, machine)
    for kind in kinds:
        place = places.get(kind, "device")
        is_moved = kind in moved and place == "device" and machine.has_gpu
        yield Item(kind, model.role, sizes[kind], "host" if is_moved else place)
    beside: Place = "host" if machine.has_gpu else "device"
    if model.engine is not None:
        passing = streamed(model.present, model.engine, world=workload.shards)
        yield Item("streaming", model.role, passing, beside)
    if model.trained is None or "moments" not in kinds:
        return
    each = moment_bytes(model.trained.optim)
    own = int(4 * sizes["moments"] / each) if each else sizes["masters"]
    use = workload.model(model.role)
    if use.keeps_average:
        place = places.get("masters", "device")
        yield Item("ema", model.role, own, "host" if place == "disk" else place)
    if use.keeps_best:
        yield Item("best", model.role, own, beside)
    if use.keeps_start:
        yield Item("start", model.role, own, beside)
