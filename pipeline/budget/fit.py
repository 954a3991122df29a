"""Does a step fit a machine?"""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.budget.machine import GIB, MIB, Machine
from pipeline.budget.table import Phase, StepMemory


@dataclass(frozen=True)
class Shortage:
    """A phase that takes more than there is."""

    phase: Phase
    where: str
    """As "each GPU"."""

    needed: int
    there: int

    def __str__(self) -> str:
        """The sentence's beginning: what it takes and what there is."""
        needed, there = in_words(self.needed, self.there)
        return f"takes {needed} on {self.where} to {self.phase.name}, and there are {there}"


def shortage(memory: StepMemory, machine: Machine) -> Shortage | None:
    """The phase that lacks most; None where all fit, as far as is known."""
    lacks = _shortages(memory, machine)
    return max(lacks, key=lambda short: short.needed - short.there, default=None)


def _shortages(memory: StepMemory, machine: Machine) -> Iterator[Shortage]:
    for phase in memory.phases:
        least = phase.least()
        device, host = least.peak("device"), least.peak("host")
        if machine.gpu_bytes is not None and device > machine.gpu_bytes:
            yield Shortage(phase, "each GPU", device, machine.gpu_bytes)
        if machine.host_bytes is None:
            continue
        on_host = machine.processes * (host if machine.has_gpu else device + host)
        if on_host > machine.host_bytes:
            yield Shortage(phase, "each machine", on_host, machine.host_bytes)


def in_words(*sizes: int) -> tuple[str, ...]:
    """Bytes in GiB, or in MiB where all are small."""
    large = max(sizes) >= GIB
    unit, name = (GIB, "GiB") if large else (MIB, "MiB")
    return tuple(f"{size / unit:.1f} {name}" for size in sizes)
