"""A queue in which clients take turns: one's hundred requests don't stand before another's one."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of clients; of each client oldest first, and of the clients one after the other."""

    def __init__(self) -> None:
        self._items: OrderedDict[Hashable, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for items in self._items.values():
            yield from items

    def add(self, client: Hashable, item: T) -> None:
        """Come last of this client's."""
        self._items.setdefault(client, deque()).append(item)
        self._count += 1

    def take(self) -> T:
        """The oldest item of the client whose turn it is, who then comes last."""
        client, items = next(iter(self._items.items()))
        item = items.popleft()
        self._count -= 1
        if items:
            self._items.move_to_end(client)
        else:
            del self._items[client]
        return item

    def remove(self, client: Hashable, item: T) -> bool:
        """Take an item out, wherever it is; False where it isn't there."""
        items = self._items.get(client, deque())
        if item not in items:
            return False
        items.remove(item)
        self._count -= 1
        if not items:
            del self._items[client]
        return True
