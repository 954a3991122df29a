"""Runs a module on cores of its own: `python -m pipeline.launch.bound MODULE [ARGUMENTS ...]`.

The cores that this process may use are shared out evenly among the processes of its machine, by
torchrun's LOCAL_RANK. Hyper-threads of one core go to the same process, and a process's cores lie
side by side, on one socket where they fit.
"""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
PLACE = ("physical_package_id", "core_id")


def cores_of(
    local_rank: int, processes: int, allowed: Sequence[int], places: Mapping[int, tuple[int, ...]]
) -> set[int]:
    """The logical CPUs of one process.

    Args:
        local_rank: number of the process on its machine.
        processes: how many there are.
        allowed: logical CPUs that they may use together.
        places: of each logical CPU its socket and core; CPUs of equal places are hyper-threads.

    Returns:
        An even share of whole cores, or of logical CPUs where there are fewer cores than processes;
        where there are fewer of these too, one that is shared.
    """
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(allowed, key=lambda cpu: (places.get(cpu, (0, cpu)), cpu)):
        cores.setdefault(places.get(cpu, (0, cpu)), []).append(cpu)
    groups = list(cores.values())
    if len(groups) < processes:
        groups = [[cpu] for group in groups for cpu in group]
    if len(groups) < processes:
        return set(groups[local_rank % len(groups)])
    first = local_rank * len(groups) // processes
    last = (local_rank + 1) * len(groups) // processes
    return {cpu for group in groups[first:last] for cpu in group}


def places_of(cpus: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Socket and core of each logical CPU, as far as the system tells."""
    places: dict[int, tuple[int, ...]] = {}
    for cpu in cpus:
        files = [TOPOLOGY / f"cpu{cpu}" / "topology" / name for name in PLACE]
        if all(file.is_file() for file in files):
            places[cpu] = tuple(int(file.read_text()) for file in files)
    return places


def main(argv: Sequence[str]) -> None:
    """Bind this process to its cores, then be the module."""
    if hasattr(os, "sched_setaffinity"):  # macOS has none
        allowed = sorted(os.sched_getaffinity(0))
        rank, processes = (int(os.environ[f"LOCAL_{name}"]) for name in ("RANK", "WORLD_SIZE"))
        os.sched_setaffinity(0, cores_of(rank, processes, allowed, places_of(allowed)))
    sys.argv = list(argv)
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
