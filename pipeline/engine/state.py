"""An engine's state as fragments of named tensors, and its loading into any other layout.

A fragment names the parameter and the elements, not the process. So the state loads at another ZeRO
stage, on another number of processes and with other units. Each process contributes the fragments
of its shard of every flat vector, at stage 0 as well.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import Columns, Fragment
from pipeline.engine.engine import Engine
from pipeline.engine.flat import FlatParams
from pipeline.engine.tensor_parts import Part, part_of, whole_shape
from pipeline.engine.trained import TrainedParams
from pipeline.parallel.group import Group
from pipeline.system.errors import CheckpointError

READ_AT_ONCE = 2**21
"""Elements that are read at once where only some columns of them are kept."""

ReadInto = Callable[[int, Tensor], None]
"""Fills a flat tensor with elements of a whole parameter from a place on."""


@dataclass(frozen=True)
class Block:
    """The elements of one shard among some consecutive elements of a part."""

    columns: Columns
    """The columns of the whole parameter that these elements lie in."""

    is_one_row: bool
    """True if the full parameter has one row, so that the elements are consecutive there."""

    first: int
    last: int
    """The shard's elements from `first` on and before `last`."""

    begin: int
    """Offset of the shard's run in a row of the part."""

    width: int
    """Elements of a row of the part."""

    offset: int
    """Number in the part of the first of the consecutive elements."""

    counts: bool
    """True if no process of lower rank has them."""

    def places(self, first: int, last: int) -> Int[Tensor, " n"]:
        """Positions of elements of the shard among the consecutive ones."""
        number = torch.arange(first, last)
        run = self.columns.run
        return number // run * self.width + self.begin + number % run - self.offset

    @property
    def is_all(self) -> bool:
        """True if they are all of the consecutive elements."""
        return self.columns.run == self.width


def blocks_of(part: Part, start: int, stop: int) -> Iterator[Block]:
    """The elements `start` to `stop` of a flattened part, shard by shard."""
    spec, inner = part.own, part.inner
    width, stride = spec.shape(part.whole)[spec.dim] * inner, part.whole[spec.dim] * inner
    one_row = part.whole[: spec.dim].numel() == 1
    for shard, begin in spec.placed():
        run, low = shard.size * inner, begin * inner

        def before(element: int, run: int = run, low: int = low) -> int:
            return element // width * run + min(max(element % width - low, 0), run)

        columns = Columns(shard.start * inner, run, stride)
        first, last = before(start), before(stop)
        if first < last:
            yield Block(columns, one_row, first, last, low, width, start, shard.counts)


def fragments_of(
    key: str, part: Part | None, start: int, values: Shaped[Tensor, " n"]
) -> Iterator[Fragment]:
    """Elements of a flattened `part` from `start` on, under their places in the whole parameter.

    Those that a process of lower rank has too are left to it.
    """
    if part is None:
        yield Fragment(key, start, values)
        return
    for block in blocks_of(part, start, start + values.numel()):
        if not block.counts:
            continue
        if block.is_all:
            own = values
        elif block.is_one_row:
            first = block.begin + block.first - start
            own = values[first : first + block.last - block.first]
        else:
            own = values[block.places(block.first, block.last).to(values.device)]
        if block.is_one_row:
            yield Fragment(key, block.columns.offset + block.first, own)
        else:
            yield Fragment(key, block.first, own, block.columns)


def read_part(part: Part | None, start: int, out: Shaped[Tensor, " n"], read: ReadInto) -> None:
    """Fill `out` with elements of a flattened `part` from `start` on.

    `read` knows those of the whole parameter. Where elements lie apart there, whole rows are read,
    a few at a time.
    """
    if part is None:
        read(start, out)
        return
    for block in blocks_of(part, start, start + out.numel()):
        if block.is_one_row:
            first = block.begin + block.first - start
            read(block.columns.offset + block.first, out[first : first + block.last - block.first])
        else:
            _read_rows(block, out, read)


def _read_rows(block: Block, out: Tensor, read: ReadInto) -> None:
    offset, run, stride = block.columns
    at_once = max(1, READ_AT_ONCE // stride)
    for row in range(block.first // run, (block.last - 1) // run + 1, at_once):
        rows = min(at_once, (block.last - 1) // run + 1 - row)
        whole = torch.empty(rows * stride, dtype=out.dtype)
        read(row * stride, whole)
        own = whole.view(rows, stride)[:, offset : offset + run].reshape(-1)
        first, last = max(block.first, row * run), min(block.last, (row + rows) * run)
        own = own[first - row * run : last - row * run].to(out.device)
        if block.is_all:
            out[first - block.first : last - block.first] = own
        else:
            out[block.places(first, last).to(out.device)] = own


logger = logging.getLogger(__name__)


def trained_fragments(engine: Engine, prefix: str) -> Iterator[Fragment]:
    """Masters and moments of this process's pieces, and the model's own buffers as they are here.

    Copy each before requesting the next: tensors from a disk, and joined masters, are temporary.
    """
    engine.zero.check_ready()
    for group in engine.visit():
        vectors = {"weights": group.masters.fp32(), **group.named_moments()}
        for kind, vector in vectors.items():
            yield from _written(group, vector, f"{prefix}/{kind}")
    elsewhere = _buffers_of_earlier_parts(engine)
    for name, buffer in _buffers(engine).items():
        if name in elsewhere:
            continue
        key = _buffer_key(prefix, name, engine.group.rank)
        yield Fragment(key, 0, buffer.detach().reshape(-1))


def frozen_fragments(engine: Engine, prefix: str) -> Iterator[Fragment]:
    """This process's pieces of the weights that don't learn."""
    for unit in engine.zero.units:
        for flat in unit.flats:
            if flat.settings.trained:
                continue
            if not _is_written(flat, engine.tensor):
                continue
            piece = flat.shard if flat.disk is None else flat.disk.read()
            first = engine.comm.rank * flat.shard_numel
            for name, start, stop in flat.stretches(*flat.written):
                own = piece[start - first : stop - first]
                own = own if flat.disk is None else own.clone()  # its place is for the next one
                begin, part = start - flat.offsets[name], part_of(flat.params[name])
                yield from fragments_of(f"{prefix}/frozen/{name}", part, begin, own)
            if flat.disk is not None:
                flat.disk.give_back()


def describe(engine: Engine) -> dict[str, Any]:
    """The rest of the state, as JSON, the same on every process; all of them call it."""
    return merged(engine.parts.gather_objects(_describe_own(engine)))


def merged(described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the descriptions of all parts of a model."""
    whole = dict(described[0])
    for other in described[1:]:
        for name, value in other.items():
            if isinstance(value, dict) and isinstance(whole[name], dict):
                whole[name] = {**whole[name], **value}
            elif isinstance(value, list):
                whole[name] = [*whole[name], *(each for each in value if each not in whole[name])]
    return whole


def _describe_own(engine: Engine) -> dict[str, Any]:
    return {
        "steps": engine.steps,
        "skipped_in_a_row": engine.skipped_in_a_row,
        "scaler": engine.scaler.state_dict(),
        "optimizer": engine.optim.name,
        "moments_kept": engine.optim.moments,
        "moments": sorted({kind for group in engine.groups for kind in group.named_moments()}),
        "counters": {
            name: group.counters() for group in engine.groups for name in group.flat.params
        },
        "trained": _shapes(engine, trained=True),
        "frozen": _shapes(engine, trained=False),
        "buffers": sorted(_buffers(engine)),
    }


@torch.no_grad()
def load(engine: Engine, prefix: str, checkpoint: Checkpoint, described: Mapping[str, Any]) -> None:
    """Load the state of an engine, and its result of `describe`. All processes call it.

    Raises:
        CheckpointError: it is of another model or another optimizer.
    """
    _check(engine, described, checkpoint)
    if described["moments_kept"] != engine.optim.moments:
        logger.info(
            "converting the moments of %s from %s to %s",
            checkpoint.path,
            described["moments_kept"],
            engine.optim.moments,
        )
    engine.zero.check_ready()
    engine.zero.updates += 1
    engine.steps = int(described["steps"])
    engine.skipped_in_a_row = int(described["skipped_in_a_row"])
    engine.scaler.load_state_dict(described["scaler"])
    for unit in engine.zero.units:
        for flat in unit.flats:
            if not flat.settings.trained:
                flat.fill(_reader(flat, f"{prefix}/frozen", checkpoint))
                flat.publish()
    for group in engine.visit():
        with group.changing() as masters:
            _load_group(group, masters, prefix, checkpoint, described)
    for name, buffer in _buffers(engine).items():
        flat = torch.empty_like(buffer).reshape(-1)
        own, first = (_buffer_key(prefix, name, rank) for rank in (engine.group.rank, 0))
        checkpoint.read(own if checkpoint.holds(own) else first, 0, flat)
        buffer.copy_(flat.view(buffer.shape))


def weights_fragments(engine: Engine, prefix: str, weights: Sequence[Tensor]) -> Iterator[Fragment]:
    """Fragments of vectors laid out as `engine.masters()`: an average, or the best so far."""
    for group, vector in zip(engine.groups, weights, strict=True):
        yield from _written(group, vector, prefix)


def read_weights(
    engine: Engine, prefix: str, checkpoint: Checkpoint, out: Sequence[Tensor]
) -> None:
    """Fill vectors laid out as `engine.masters()` with what `weights_fragments` gave."""
    for group, vector in zip(engine.groups, out, strict=True):
        read = _reader(group.flat, prefix, checkpoint)
        for name, place, elements in group.spans():
            read(name, elements.start, vector[place])


def _written(group: TrainedParams, vector: Tensor, prefix: str) -> Iterator[Fragment]:
    """This process's fragments of a vector in the layout of the masters."""
    if not _is_written(group.flat, group.tensor):
        return
    for name, place, elements in group.spans(own=True):
        part = part_of(group.flat.params[name])
        yield from fragments_of(f"{prefix}/{name}", part, elements.start, vector[place])


def _is_written(flat: FlatParams, tensor: Group) -> bool:
    """True if no process of lower rank in the tensor-parallel group has the full vector."""
    return tensor.rank == 0 or flat.settings.role in ("part", "shared")


def _reader(
    flat: FlatParams, prefix: str, checkpoint: Checkpoint
) -> Callable[[str, int, Tensor], None]:
    """Fills a tensor with elements of a parameter, by name, from a place on."""

    def read(name: str, start: int, out: Tensor) -> None:
        read_part(
            part_of(flat.params[name]), start, out, partial(checkpoint.read, f"{prefix}/{name}")
        )

    return read


def _load_group(
    group: TrainedParams,
    masters: Tensor,
    prefix: str,
    checkpoint: Checkpoint,
    described: Mapping[str, Any],
) -> None:
    moments = _room_for_moments(group, masters, described["moments"])
    for kind, vector in {"weights": masters, **moments}.items():
        read = _reader(group.flat, f"{prefix}/{kind}", checkpoint)
        for name, place, elements in group.spans():
            read(name, elements.start, vector[place])
    counters = described["counters"][next(iter(group.flat.params))]
    if counters or moments:
        scalars = {name: torch.tensor(value) for name, value in counters.items()}
        group.load_state({**moments, **scalars})
    else:
        group.state.clear()  # saved before the first update


def _room_for_moments(
    group: TrainedParams, masters: Tensor, described: Sequence[str]
) -> dict[str, Tensor]:
    """Destination tensors for the moments of a checkpoint."""
    kept, dtype = group.named_moments(), group.moment_dtype
    return {
        kind: kept[kind] if kind in kept else torch.zeros_like(masters, dtype=dtype)
        for kind in described
    }


def _check(engine: Engine, described: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    place = f"the checkpoint {checkpoint.path}"
    if described["optimizer"] != engine.optim.name:
        raise CheckpointError(
            f"{place} is of the optimizer {described['optimizer']}, not {engine.optim.name}"
        )
    own = {"trained": _shapes(engine, trained=True), "frozen": _shapes(engine, trained=False)}
    whole = merged(engine.parts.gather_objects(own))
    for kind in own:
        theirs, ours = described[kind], whole[kind]
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                raise CheckpointError(
                    f"{place} has {_shown(name, kind, theirs)}, and the model has"
                    f" {_shown(name, kind, ours)}; resume with the model and the LoRA settings it"
                    " was made with"
                )


def _shown(name: str, kind: str, shapes: Mapping[str, Any]) -> str:
    return f"{name} {kind} in shape {shapes[name]}" if name in shapes else f"no {kind} {name}"


def _shapes(engine: Engine, *, trained: bool) -> dict[str, list[int]]:
    flats = [flat for unit in engine.zero.units for flat in unit.flats]
    return {
        name: list(whole_shape(param))
        for flat in flats
        if flat.settings.trained is trained
        for name, param in flat.params.items()
    }


def _buffers_of_earlier_parts(engine: Engine) -> set[str]:
    """The buffers that a process with an earlier part of the model has as well, and writes."""
    parts = engine.parts
    of_parts = parts.gather_objects(sorted(_buffers(engine)))
    return {name for own in of_parts[: parts.rank] for name in own}


def _buffer_key(prefix: str, name: str, rank: int) -> str:
    """The name of a buffer; the first process's are the model's, the others' may differ."""
    return f"{prefix}/buffers/{name}" if rank == 0 else f"{prefix}/buffers_of_rank_{rank}/{name}"


def _buffers(engine: Engine) -> dict[str, Tensor]:
    """Buffers that belong to the model's state, as running statistics do."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in engine.model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set  # noqa: SLF001  # nothing else tells
    }
