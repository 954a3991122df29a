"""Main memory that there is now, within the limits of containers."""

from collections.abc import Sequence
from pathlib import Path

import psutil


def available_bytes(groups: Sequence[Path] | None = None) -> int:
    """Main memory that may be taken now: what the system has, within the limits of containers.

    Args:
        groups: directories of the control groups that may limit this process; by default its own
            and those around it.
    """
    rooms = [_room_in(group) for group in (own_groups() if groups is None else groups)]
    limited = [room for room in rooms if room is not None]
    return min([psutil.virtual_memory().available, *limited])


def own_groups(
    cgroup_file: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[Path]:
    """The control groups of this process, from its own outwards, in versions 1 and 2."""
    try:
        lines = cgroup_file.read_text().splitlines()
    except OSError:
        return []
    groups: list[Path] = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds in ("", "memory"):
            top = root / kinds
            own = top / path.lstrip("/")
            groups += [each for each in (own, *own.parents) if each.is_relative_to(top)]
    return groups


def _room_in(group: Path) -> int | None:
    """What a control group's limit leaves; None where it has none."""
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, usage = _number(group / most), _number(group / used)
        if limit is not None and usage is not None:
            # Pages of files are given back as soon as memory is asked for.
            return max(0, limit - usage + _inactive_file(group / "memory.stat"))
    return None


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file(stat: Path) -> int:
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))
