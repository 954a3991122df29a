"""Several short dialogues in one sequence: which ones share it."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups of indices into `lengths`, each group's lengths summing to at most `capacity`.

    Best fit decreasing: from the longest to the shortest, each goes where the least room is left
    over. It needs at most 11/9 of the fewest possible groups, plus one (Johnson 1974). Every index
    occurs once; indices ascend inside a group and groups are ordered by their first index, so the
    result depends on nothing but the arguments.

    Raises:
        ValueError: a length is below 1 or above `capacity`.
    """
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room left -> groups that have exactly that much
    rooms: list[int] = []  # the keys of `with_room`, ascending
    for index in by_length:
        length = lengths[index]
        if not 0 < length <= capacity:
            raise ValueError(f"length {length} of item {index} is not between 1 and {capacity}")
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            group = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            room, group = capacity, len(groups)
            groups.append([])
        groups[group].append(index)
        left = room - length
        if left and left not in with_room:
            insort(rooms, left)
        if left:
            with_room.setdefault(left, []).append(group)
    return sorted(sorted(group) for group in groups)
