"""Does a step fit a machine?"""

from collections.abc import Iterable, Iterator
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

    of_devices: bool = True
    """Whether it is memory that models compute in, and not main memory beside a GPU."""

    def __str__(self) -> str:
        """The sentence's beginning: what it takes and what there is."""
        needed, there = in_words(self.needed, self.there)
        return f"takes {needed} on {self.where} to {self.phase.name}, and there are {there}"


def shortage(memory: StepMemory, machine: Machine) -> Shortage | None:
    """The phase that lacks most; None where all fit that must, as far as is known."""
    return _most_lacking((phase for phase in memory.phases if not phase.optional), machine)


def left_out(memory: StepMemory, machine: Machine) -> Iterator[Shortage]:
    """The phases that the step does without, since they don't fit."""
    for phase in memory.phases:
        short = _most_lacking([phase], machine) if phase.optional else None
        if short is not None:
            yield short


def _most_lacking(phases: Iterable[Phase], machine: Machine) -> Shortage | None:
    lacks = _shortages(phases, machine)
    return max(lacks, key=lambda short: short.needed - short.there, default=None)


def _shortages(phases: Iterable[Phase], machine: Machine) -> Iterator[Shortage]:
    for phase in phases:
        least = phase.least()
        device, host = least.peak("device"), least.peak("host")
        if machine.gpu_bytes is not None and device > machine.gpu_bytes:
            yield Shortage(phase, "each GPU", device, machine.gpu_bytes)
        if machine.host_bytes is None:
            continue
        on_host = machine.processes * (host if machine.has_gpu else device + host)
        if on_host > machine.host_bytes:
            beside = machine.has_gpu
            yield Shortage(
                phase, "each machine", on_host, machine.host_bytes, of_devices=not beside
            )


def in_words(*sizes: int) -> tuple[str, ...]:
    """Bytes in GiB, or in MiB where all are small."""
    large = max(sizes) >= GIB
    unit, name = (GIB, "GiB") if large else (MIB, "MiB")
    return tuple(f"{size / unit:.1f} {name}" for size in sizes)
