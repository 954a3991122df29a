"""An engine's state as fragments of named tensors, which can be loaded into any other layout.

A fragment names the parameter and the elements, not the process, so the state can be loaded at a
different ZeRO stage, on a different number of processes and with different units. Each process
writes the fragments of its shard of every flat vector, even at stage 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import Columns, Fragment
from pipeline.engine.engine import Engine
from pipeline.engine.optimizer.trained import TrainedParams
from pipeline.engine.sharding.flat import FlatParams
from pipeline.engine.sharding.tensor_parallel import ParamShard, full_shape, get_shard
from pipeline.kernels.adamw import new_moments
from pipeline.parallel.group import Group
from pipeline.system.errors import CheckpointError

READ_ELEMENTS = 2**21
"""Number of elements read at once if only some of their columns are kept."""

ReadInto = Callable[[int, Tensor], None]
"""Fills a 1-D tensor with elements of a full parameter, starting at an index."""


def shard_columns(param_shard: ParamShard) -> Iterator[tuple[Columns, Columns, bool]]:
    """Yield each range's columns in the shard and in the full parameter, and whether it's saved."""
    spec, inner, shape = param_shard.spec, param_shard.inner, param_shard.full_shape
    local_stride, stride = spec.shape(shape)[spec.dim] * inner, shape[spec.dim] * inner
    for shard, begin in spec.with_offsets():
        width = shard.size * inner
        local = Columns(begin * inner, width, local_stride)
        full = Columns(shard.start * inner, width, stride)
        yield local, full, shard.is_first_copy


def list_fragments(
    key: str, shard: ParamShard | None, start: int, values: Shaped[Tensor, " n"]
) -> Iterator[Fragment]:
    """Yield a flattened shard's elements, starting at `start`, as fragments of the full parameter.

    Elements that a lower-ranked process also has are omitted.
    """
    if shard is None:
        yield Fragment(key, start, values)
        return
    for local, full, is_saved in shard_columns(shard):
        first, last = local.count_before(start), local.count_before(start + len(values))
        if first == last or not is_saved:
            continue
        if last <= full.width:  # contiguous in both the shard and the full parameter
            begin = local.offset + first - start
            yield Fragment(key, full.offset + first, values[begin : begin + last - first])
        elif local.width == local.stride:
            yield Fragment(key, first, values, full)
        else:
            positions = local.positions(first, last).to(values.device) - start
            yield Fragment(key, first, values[positions], full)


def read_shard(
    shard: ParamShard | None, start: int, out: Shaped[Tensor, " n"], read: ReadInto
) -> None:
    """Fill `out` with elements of a flattened shard, starting at `start`.

    `read` reads elements of the full parameter. If they are not contiguous there, full rows are
    read, a few at a time.
    """
    if shard is None:
        read(start, out)
        return
    for local, full, _ in shard_columns(shard):
        first, last = local.count_before(start), local.count_before(start + len(out))
        if first == last:
            continue
        if last <= full.width:
            begin = local.offset + first - start
            read(full.offset + first, out[begin : begin + last - first])
            continue
        step = max(1, READ_ELEMENTS // full.stride) * full.width
        for low in range(first // full.width * full.width, last, step):
            high = min(low + step, -(-last // full.width) * full.width)
            rows = torch.empty((high - low) // full.width * full.stride, dtype=out.dtype)
            read(low // full.width * full.stride, rows)
            values = rows.view(-1, full.stride)[:, full.offset : full.offset + full.width].flatten()
            begin, end = max(first, low), min(last, high)
            positions = local.positions(begin, end).to(out.device) - start
            out[positions] = values[begin - low : end - low].to(out.device)


def trained_fragments(engine: Engine, prefix: str) -> Iterator[Fragment]:
    """Yield the masters and moments of this process's shards, and the model's buffers.

    Copy each fragment before requesting the next: tensors from disk and joined masters are freed.
    """
    engine.zero.check_ready()
    for group in engine.iter_groups():
        vectors = {"weights": group.masters.fp32(), **group.named_moments()}
        for kind, vector in vectors.items():
            yield from _list_group_fragments(group, vector, f"{prefix}/{kind}")
    group, buffers = engine.model_parallel, _buffers(engine)
    lower_ranks = group.gather_objects(sorted(buffers))[: group.rank]
    for name in sorted(buffers.keys() - {name for names in lower_ranks for name in names}):
        if engine.group.rank == 0:
            yield Fragment(f"{prefix}/buffers/{name}", 0, buffers[name].detach().reshape(-1))


def frozen_fragments(engine: Engine, prefix: str) -> Iterator[Fragment]:
    """Yield this process's shards of the frozen weights."""
    for flat in engine.zero.flats:
        if flat.settings.trained or not _is_saved(flat, engine.tensor):
            continue
        vector = flat.shard if flat.disk is None else flat.disk.read()
        first = engine.comm.rank * flat.shard_numel
        for name, start, stop in flat.param_ranges(*flat.checkpoint_range):
            values = vector[start - first : stop - first]
            values = values if flat.disk is None else values.clone()  # the next read reuses it
            begin, shard = start - flat.offsets[name], get_shard(flat.params[name])
            yield from list_fragments(f"{prefix}/frozen/{name}", shard, begin, values)
        if flat.disk is not None:
            flat.disk.release()


def describe(engine: Engine) -> dict[str, Any]:
    """Return the state without tensors, as the same JSON on all ranks, which must all call this."""
    local = {
        "steps": engine.steps,
        "skipped_in_a_row": engine.skipped_in_a_row,
        "scaler": engine.scaler.state_dict(),
        "moments": sorted({kind for group in engine.groups for kind in group.named_moments()}),
        "counters": {
            name: group.counters() for group in engine.groups for name in group.flat.params
        },
        "trained": _shapes(engine, trained=True),
        "frozen": _shapes(engine, trained=False),
        "buffers": sorted(_buffers(engine)),
    }
    return merge_descriptions(engine.model_parallel.gather_objects(local))


def merge_descriptions(descriptions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the descriptions of all shards and stages of a model."""
    merged = dict(descriptions[0])
    for other in descriptions[1:]:
        for name, value in other.items():
            if isinstance(value, dict) and isinstance(merged[name], dict):
                merged[name] = {**merged[name], **value}
            elif isinstance(value, list):
                merged[name] = [*merged[name], *(v for v in value if v not in merged[name])]
    return merged


@torch.no_grad()
def load(engine: Engine, prefix: str, checkpoint: Checkpoint, described: Mapping[str, Any]) -> None:
    """Load an engine's state, given the result of `describe`; all processes must call this.

    Raises:
        CheckpointError: the state is from a different model, or can't be read.
    """
    _check_shapes(engine, described, checkpoint)
    engine.zero.check_ready()
    engine.zero.updates += 1
    engine.steps = int(described["steps"])
    engine.skipped_in_a_row = int(described["skipped_in_a_row"])
    engine.scaler.load_state_dict(described["scaler"])
    for flat in engine.zero.flats:
        if not flat.settings.trained:
            flat.fill(_make_reader(flat, f"{prefix}/frozen", checkpoint))
            flat.publish()
    for group in engine.iter_groups():
        with group.modify() as masters:
            _load_group(group, masters, prefix, checkpoint, described)
    for name, buffer in _buffers(engine).items():
        flat = torch.empty_like(buffer).reshape(-1)
        checkpoint.read(f"{prefix}/buffers/{name}", 0, flat)
        buffer.copy_(flat.view(buffer.shape))


def weights_fragments(engine: Engine, prefix: str, weights: Sequence[Tensor]) -> Iterator[Fragment]:
    """Yield vectors laid out like `engine.masters()`, such as the best weights, as fragments."""
    for group, vector in zip(engine.groups, weights, strict=True):
        yield from _list_group_fragments(group, vector, prefix)


def read_weights(
    engine: Engine, prefix: str, checkpoint: Checkpoint, out: Sequence[Tensor]
) -> None:
    """Fill vectors laid out like `engine.masters()` from the fragments of `weights_fragments`."""
    for group, vector in zip(engine.groups, out, strict=True):
        read = _make_reader(group.flat, prefix, checkpoint)
        for name, span, elements in group.param_spans():
            read(name, elements.start, vector[span])


def _list_group_fragments(group: TrainedParams, vector: Tensor, prefix: str) -> Iterator[Fragment]:
    """Yield this process's fragments of a vector laid out like the masters."""
    if not _is_saved(group.flat, group.tensor):
        return
    for name, span, elements in group.param_spans(saved_only=True):
        shard = get_shard(group.flat.params[name])
        yield from list_fragments(f"{prefix}/{name}", shard, elements.start, vector[span])


def _is_saved(flat: FlatParams, tensor: Group) -> bool:
    """Return whether this process saves the vector; full parameters are saved by tp rank 0 only."""
    return tensor.rank == 0 or flat.settings.role in ("sharded", "overlapping")


def _make_reader(
    flat: FlatParams, prefix: str, checkpoint: Checkpoint
) -> Callable[[str, int, Tensor], None]:
    """Return a function that fills a tensor with elements of a parameter, starting at an index."""

    def read(name: str, start: int, out: Tensor) -> None:
        source = partial(checkpoint.read, f"{prefix}/{name}")
        read_shard(get_shard(flat.params[name]), start, out, source)

    return read


def _load_group(
    group: TrainedParams,
    masters: Tensor,
    prefix: str,
    checkpoint: Checkpoint,
    description: Mapping[str, Any],
) -> None:
    current = group.named_moments() or new_moments(masters, group.moment_dtype)
    for vector in current.values():
        vector.zero_()  # those on disk outlive a state saved before the first update
    moments = {kind: current[kind] for kind in description["moments"]}
    for kind, vector in {"weights": masters, **moments}.items():
        read = _make_reader(group.flat, f"{prefix}/{kind}", checkpoint)
        for name, span, elements in group.param_spans():
            read(name, elements.start, vector[span])
    counters = description["counters"][next(iter(group.flat.params))]
    scalars = {name: torch.tensor(value) for name, value in counters.items()}
    group.state = {**moments, **scalars}  # empty if saved before the first update


def _check_shapes(engine: Engine, description: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    local = {"trained": _shapes(engine, trained=True), "frozen": _shapes(engine, trained=False)}
    merged = merge_descriptions(engine.model_parallel.gather_objects(local))
    for kind in local:
        saved, current = description[kind], merged[kind]
        for name in sorted(saved.keys() | current.keys()):
            if saved.get(name) != current.get(name):
                has, expects = (_describe_param(name, kind, d) for d in (saved, current))
                raise CheckpointError(
                    f"the checkpoint {checkpoint.path} has {has}, but the model has {expects};"
                    " resume with the original model and LoRA settings"
                )


def _describe_param(name: str, kind: str, shapes: Mapping[str, Any]) -> str:
    param = f"{kind} parameter {name}"
    return f"the {param} of shape {shapes[name]}" if name in shapes else f"no {param}"


def _shapes(engine: Engine, *, trained: bool) -> dict[str, list[int]]:
    return {
        name: list(full_shape(param))
        for flat in engine.zero.flats
        if flat.settings.trained is trained
        for name, param in flat.params.items()
    }


def _buffers(engine: Engine) -> dict[str, Tensor]:
    """Return the persistent buffers of the model, such as running statistics."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in engine.model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set  # noqa: SLF001  # no public API
    }
