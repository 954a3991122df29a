"""The bytes of a step: what is held where, by phase and kind."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Place = Literal["device", "host", "disk"]
"""Where the model computes, main memory beside a GPU, or a file."""

PhaseName = Literal["load", "train", "generate", "score", "compare"]

KINDS = (
    *("weights", "masters", "moments", "gradients", "gradient_buffers", "streaming"),
    *(
        "gathered",
        "activations",
        "logits",
        "replica",
        "kv_cache",
        "ema",
        "best",
        "start",
        "runtime",
    ),
)
"""In the order in which they are shown."""


@dataclass(frozen=True)
class Item:
    """Something that one process holds for a while."""

    kind: str
    """One of `KINDS`."""

    role: str
    """Of the models: model, actor, critic, reference, reward, base; empty where it is of none."""

    num_bytes: int
    """Most that it has in its phase."""

    place: Place = "device"

    moments: frozenset[str] | None = None
    """Parts of the phase in which it is there; None is all of it."""

    least: int | None = None
    """What it can do with, where it is made as large as there is room; None is all of it."""


@dataclass(frozen=True)
class Phase:
    """A part of a step, which holds what others have given back."""

    name: PhaseName
    items: tuple[Item, ...]

    optional: bool = False
    """Whether the step does without it where it doesn't fit."""

    def by_kind(self, place: Place) -> Mapping[str, int]:
        """Bytes on each process, each kind at its own highest moment; none of 0."""
        highest = Counter[str]()
        for moment in self._moments:
            sums = Counter[str]()
            for item in self._there(place, moment):
                sums[item.kind] += item.num_bytes
            highest |= sums  # the larger of each
        return {kind: highest[kind] for kind in KINDS if highest[kind]}

    def weights(self, place: Place) -> Mapping[str, int]:
        """Bytes of the weights on each process by role, in the moment that has most of them."""
        moments = (
            Counter(
                {
                    item.role: item.num_bytes
                    for item in self._there(place, moment)
                    if item.kind == "weights"
                }
            )
            for moment in self._moments
        )
        return max(moments, key=lambda sums: sums.total())

    def peak(self, place: Place) -> int:
        """Most bytes on each process at any moment."""
        return max(
            sum(item.num_bytes for item in self._there(place, moment)) for moment in self._moments
        )

    def least(self) -> "Phase":
        """The phase with what it can do with."""
        items = (
            each if each.least is None else replace(each, num_bytes=each.least)
            for each in self.items
        )
        return replace(self, items=tuple(items))

    @property
    def _moments(self) -> set[str]:
        return {name for item in self.items for name in item.moments or ()} or {""}

    def _there(self, place: Place, moment: str) -> Iterator[Item]:
        for item in self.items:
            if item.place == place and (item.moments is None or moment in item.moments):
                yield item


@dataclass(frozen=True)
class StepMemory:
    """What a step takes on each of its processes."""

    phases: tuple[Phase, ...]

    unknown: tuple[str, ...] = ()
    """What could not be counted, a sentence each; the step takes more than the phases say."""

    parameters: Mapping[str, int] | None = None
    """Of each model, by role, adapters included."""

    stage: int | None = None
    """Of a pipeline, the stage whose processes these are: the one that takes most."""

    def peak(self, place: Place) -> int:
        """Most bytes on each process in any phase."""
        return max((phase.peak(place) for phase in self.phases), default=0)
