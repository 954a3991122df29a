"""How processes generate together.

Those that share a model each generate all responses; those that have the same prompts, and models
of their own, each some.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from inference.engine.requests import (
    Finished,
    OnToken,
    StopWhen,
)
from pipeline.parallel.group import Group

T = TypeVar("T")


class GroupDisagreesError(RuntimeError):
    """Processes that compute each layer together chose different tokens."""


@dataclass(frozen=True)
class Exchange:
    """Prompts of all peers, in rank order, and which of them are this process's own.

    One that several have under the same key, as processes have that train each layer together, is
    answered once for all of them.
    """

    tp_group: Group

    prompts: list[tuple[tuple[int, ...], int]]
    """Token ids and key of each."""

    firsts: list[int]
    """Index of each among the prompts of the first process that has it."""

    places: list[list[int]]
    """Indices of each among this process's own; empty where it has it not."""

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], keys: Sequence[int], tp_group: Group
    ) -> "Exchange":
        """Exchange prompts, of any number and lengths; the group calls it in step."""
        own = [(tuple(prompt), key) for prompt, key in zip(prompts, keys, strict=True)]
        everyones = tp_group.gather_objects(own)
        numbers: dict[tuple[tuple[int, ...], int, int], int] = {}
        firsts: list[int] = []
        places: list[list[int]] = []
        for rank, theirs in enumerate(everyones):
            times = Counter[tuple[tuple[int, ...], int]]()
            for place, prompt in enumerate(theirs):
                times[prompt] += 1
                number = numbers.setdefault((*prompt, times[prompt]), len(firsts))
                if number == len(firsts):
                    firsts.append(place)
                    places.append([])
                if rank == tp_group.rank:
                    places[number].append(place)
        unique = [(ids, key) for ids, key, _ in numbers]
        return cls(tp_group, unique, firsts, places)

    def smallest(self, number: int) -> int:
        """The smallest number of all peers."""
        return min(self.tp_group.gather_objects(number))

    def on_token(self, on_token: OnToken | None) -> OnToken | None:
        """Calls `on_token` for this process's own tokens alone, by its own indices."""
        if on_token is None or self.tp_group.size == 1:
            return on_token

        def own(index: int, token: int) -> None:
            for place in self.places[index]:
                on_token(place, token)

        return own

    def stop_when(self, stop_when: StopWhen | None) -> StopWhen | None:
        """Calls `stop_when` by the indices of each prompt's own process; it must agree on all."""
        if stop_when is None or self.tp_group.size == 1:
            return stop_when
        return lambda index, ids: stop_when(self.firsts[index], ids)

    def own(self, finished: Iterator[Finished]) -> Iterator[Finished]:
        """This process's responses as they end; the others' are generated on the way.

        Raises:
            GroupDisagreesError: the peers did not choose the same tokens.
        """
        if self.tp_group.size == 1:
            yield from finished
            return
        chosen = 0
        for each in finished:
            chosen = zlib.crc32(repr((each.index, each.response.ids)).encode(), chosen)
            for place in self.places[each.index]:
                yield replace(each, index=place)
        require_equal(self.tp_group.gather_objects(chosen))


def require_equal(chosen: Sequence[int]) -> None:
    """Compare what stands for the tokens that each process chose.

    Raises:
        GroupDisagreesError: they are not the same.
    """
    if len(set(chosen)) > 1:
        raise GroupDisagreesError(
            "the processes that generate together chose different tokens: they run different"
            " versions, or on different devices"
        )


class SamePrompts:
    """So many prompts, in the same order on all processes of a group, each with its own model.

    Each answers neighbours: equal prompts, which mostly are, are read once then.
    """

    def __init__(self, group: Group, count: int) -> None:
        self._group = group
        share = -(-count // group.size)
        self._first = min(group.rank * share, count)
        self._last = min(self._first + share, count)

    def own(self, each: Sequence[T]) -> Sequence[T]:
        """The share of this process, of something that each prompt has."""
        return each[self._first : self._last]

    def on_token(self, on_token: OnToken | None) -> OnToken | None:
        """Called with the number of the prompt among all."""
        if on_token is None or self._group.size == 1:
            return on_token
        return lambda index, token: on_token(self._first + index, token)

    def stop_when(self, stop_when: StopWhen | None) -> StopWhen | None:
        """Called with the number of the prompt among all."""
        if stop_when is None or self._group.size == 1:
            return stop_when
        return lambda index, ids: stop_when(self._first + index, ids)

    def all(self, finished: Iterator[Finished]) -> Iterator[Finished]:
        """This process's responses as they end, and then those of the others."""
        if self._group.size == 1:
            yield from finished
            return
        own: list[Finished] = []
        for each in finished:
            own.append(replace(each, index=self._first + each.index))
            yield own[-1]
        for rank, theirs in enumerate(self._group.gather_objects(own)):
            if rank != self._group.rank:
                yield from theirs
