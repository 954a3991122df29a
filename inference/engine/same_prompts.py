"""Prompts that several processes have, each with a model of its own: each answers some of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from inference.engine.requests import Finished, OnToken, StopWhen
from pipeline.parallel.group import Group

T = TypeVar("T")


class SamePrompts:
    """So many prompts, in the same order on all processes of a group.

    Each answers neighbours: equal prompts, which mostly are, are read once then.
    """

    def __init__(self, group: Group, count: int) -> None:
        self._group = group
        share = -(-count // group.size)
        self._first = min(group.rank * share, count)
        self._last = min(self._first + share, count)

    def own(self, each: Sequence[T]) -> Sequence[T]:
        """Of something that each prompt has, that of those which this process answers."""
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
