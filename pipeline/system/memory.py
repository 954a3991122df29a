"""Available host memory, within container limits, and the peak memory of this process."""

import re
from collections.abc import Sequence
from pathlib import Path

import psutil

LIMIT_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Names of the files with a control group's limit and usage, for cgroup versions 2 and 1."""


def available_bytes(groups: Sequence[Path] | None = None) -> int:
    """Return the bytes of host memory that can be allocated, within container limits.

    `groups` are directories of control groups, by default this process's and their parents.
    """
    in_groups = map(_available_in, control_groups() if groups is None else groups)
    limits = (available for available in in_groups if available is not None)
    return min([psutil.virtual_memory().available, *limits])


def memory_bytes() -> int:
    """Return this process's peak memory in bytes; with a GPU, the peak of its tensors there."""
    import torch  # planning needs only the other functions

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")  # ru_maxrss includes the parent's memory
    peak = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(peak[1]) if peak else psutil.Process().memory_info().rss  # not Linux


def count_memory_kills() -> int:
    """Count processes that the kernel killed because the system or a container lacked memory."""
    counters = (line.partition(" ") for line in _read(Path("/proc/vmstat")).splitlines())
    return next((int(value) for name, _, value in counters if name == "oom_kill"), 0)


def control_groups() -> list[Path]:
    """List the control groups of this process (cgroup v1 and v2), innermost first."""
    groups: list[Path] = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = Path("/sys/fs/cgroup") / controllers
            group = top / path.lstrip("/")
            groups += [parent for parent in (group, *group.parents) if parent.is_relative_to(top)]
    return groups


def _available_in(group: Path) -> int | None:
    """Return the bytes left below a control group's limit, or None if it has no limit."""
    for limit_file, usage_file in LIMIT_FILES:
        limit, usage = _read(group / limit_file), _read(group / usage_file)
        if limit.isdigit() and usage.isdigit():
            stat = (line.partition(" ") for line in _read(group / "memory.stat").splitlines())
            values = {name: value for name, _, value in stat}
            # Inactive file pages are reclaimed on demand.
            inactive = values.get("total_inactive_file", values.get("inactive_file", "0"))
            return max(0, int(limit) - int(usage) + int(inactive))
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
