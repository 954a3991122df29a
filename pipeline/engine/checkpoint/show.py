"""A checkpoint in a few lines for a person."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.engine.checkpoint.checkpoint import Checkpoint

VALUE_WIDTH = 60


@dataclass
class _Kind:
    """What the tensors of one kind come to."""

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0


def describe(checkpoint: Checkpoint) -> list[str]:
    """Lines: step, date, processes, versions; tensors by kind; the state's fields."""
    manifest = checkpoint.manifest
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    lines = [
        str(checkpoint.path),
        f"  step {checkpoint.step}, saved {manifest.created}, processes: {checkpoint.world_size}",
        f"  {versions}",
    ]
    if manifest.base is not None:
        lines.append(f"  frozen weights in {manifest.base}")
    return [*lines, *_table(checkpoint), *_state(checkpoint)]


def _table(checkpoint: Checkpoint) -> Iterator[str]:
    kinds: dict[str, _Kind] = {}
    for key in checkpoint.keys():  # noqa: SIM118  # not a mapping
        kind = kinds.setdefault(_kind_of(key), _Kind())
        kind.tensors += 1
        kind.elements += checkpoint.numel(key)
        kind.nbytes += checkpoint.numel(key) * checkpoint.dtype(key).itemsize
    width = max([4, *map(len, kinds)])
    yield f"  {'kind':<{width}}  {'tensors':>8}  {'elements':>16}  {'bytes':>18}"
    for name, kind in sorted(kinds.items()):
        yield (f"  {name:<{width}}  {kind.tensors:>8,}  {kind.elements:>16,}  {kind.nbytes:>18,}")


def _kind_of(key: str) -> str:
    """`actor/exp_avg` of `actor/exp_avg/model.norm.weight`."""
    words = key.split("/")
    return "/".join(words[:-1][:2]) or key


def _state(checkpoint: Checkpoint) -> Iterator[str]:
    for name, value in checkpoint.state.items():
        text = json.dumps(value)
        if len(text) > VALUE_WIDTH:
            text = text[: VALUE_WIDTH - 4] + " ..."
        yield f"  {name}: {text}"
