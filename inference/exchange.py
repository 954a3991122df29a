"""What the processes of a group ask of the model they share: each answers everyone's prompts."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from inference.requests import Request, StopWhen
from pipeline.parallel.group import Group

OnToken = Callable[[int, int], None]
"""Told of each token: index of the prompt, token."""


class PeersDisagreeError(RuntimeError):
    """Processes that compute each layer together chose different tokens."""


@dataclass(frozen=True)
class Exchange:
    """Prompts of all peers, in rank order, and which of them are this process's own."""

    tp_group: Group

    asked: list[tuple[tuple[int, ...], int]]
    """Token ids and key of each prompt."""

    places: list[int]
    """Index of each among the prompts of its own process."""

    first: int
    """Of this process's prompts."""

    count: int

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], keys: Sequence[int], tp_group: Group
    ) -> "Exchange":
        """Exchange prompts, of any number and lengths; the group calls it in step."""
        own = [(tuple(prompt), key) for prompt, key in zip(prompts, keys, strict=True)]
        everyones = tp_group.gather_objects(own)
        return cls(
            tp_group=tp_group,
            asked=[each for asked in everyones for each in asked],
            places=[place for asked in everyones for place in range(len(asked))],
            first=sum(len(asked) for asked in everyones[: tp_group.rank]),
            count=len(own),
        )

    def is_own(self, index: int) -> bool:
        """Whether a prompt is this process's."""
        return self.first <= index < self.first + self.count

    def smallest(self, number: int) -> int:
        """The smallest number of all peers."""
        return min(self.tp_group.gather_objects(number))

    def on_token(self, tell: OnToken | None) -> OnToken | None:
        """Tells of this process's tokens alone, by its own indices."""
        if tell is None or self.tp_group.size == 1:
            return tell

        def own(index: int, token: int) -> None:
            if self.is_own(index):
                tell(self.places[index], token)

        return own

    def stop_when(self, stop_when: StopWhen | None) -> StopWhen | None:
        """Asks by the indices of each prompt's own process; all processes must answer alike."""
        if stop_when is None or self.tp_group.size == 1:
            return stop_when
        return lambda index, ids: stop_when(self.places[index], ids)

    def own(self, requests: Iterator[Request]) -> Iterator[Request]:
        """This process's requests as they end; the others' are answered on the way.

        Raises:
            PeersDisagreeError: the peers did not choose the same tokens.
        """
        if self.tp_group.size == 1:
            yield from requests
            return
        chosen = 0
        for request in requests:
            chosen = zlib.crc32(repr((request.index, request.response.ids)).encode(), chosen)
            if self.is_own(request.index):
                yield replace(request, index=self.places[request.index])
        if len(set(self.tp_group.gather_objects(chosen))) > 1:
            raise PeersDisagreeError(
                "the processes that generate together chose different tokens: they run different"
                " versions, or on different devices"
            )
