"""Whether a step fits a machine, and the memory plan in words."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.budget.machine import GIB, MIB, Machine
from pipeline.budget.memory import KINDS, Phase, Place, StepMemory

LEFT_OUT = {"compare": "the comparison with the base model"}
"""Purpose of the optional phases, by name."""

PLACES: Mapping[Place, str] = {"host": "in main memory", "disk": "on the disk"}


@dataclass(frozen=True)
class Shortage:
    """A phase that needs more than there is."""

    phase: Phase
    where: str
    """As "each GPU"."""

    needed: int
    available: int

    def __str__(self) -> str:
        """The need and the supply, to follow the name of a step."""
        needed, available = in_words(self.needed, self.available)
        return f"takes {needed} on {self.where} to {self.phase.name}, and there are {available}"


def shortage(memory: StepMemory, machine: Machine) -> Shortage | None:
    """The required phase that lacks most; None where all of them fit, as far as is known."""
    return _most_lacking((phase for phase in memory.phases if not phase.optional), machine)


def left_out(memory: StepMemory, machine: Machine) -> Iterator[Shortage]:
    """The optional phases that don't fit."""
    for phase in memory.phases:
        short = _most_lacking([phase], machine) if phase.optional else None
        if short is not None:
            yield short


def _most_lacking(phases: Iterable[Phase], machine: Machine) -> Shortage | None:
    lacks = _shortages(phases, machine)
    return max(lacks, key=lambda short: short.needed - short.available, default=None)


def _shortages(phases: Iterable[Phase], machine: Machine) -> Iterator[Shortage]:
    for phase in phases:
        least = phase.least()
        device, host = least.peak("device"), least.peak("host")
        if machine.gpu_bytes is not None and device > machine.gpu_bytes:
            yield Shortage(phase, "each GPU", device, machine.gpu_bytes)
        on_host = machine.processes * (host if machine.has_gpu else device + host)
        if machine.host_bytes is not None and on_host > machine.host_bytes:
            yield Shortage(phase, "each machine", on_host, machine.host_bytes)


def in_words(*sizes: int) -> tuple[str, ...]:
    """Bytes in GiB, or in MiB where all are small."""
    large = max(sizes) >= GIB
    unit, name = (GIB, "GiB") if large else (MIB, "MiB")
    return tuple(f"{size / unit:.1f} {name}" for size in sizes)


def table(memory: StepMemory, machine: Machine) -> Iterator[str]:
    """Kinds down, phases across; main memory and disk after the device."""
    unit = GIB if memory.peak("device") >= GIB else MIB
    for role, count in memory.parameters.items():
        yield f"  {role:<18} {count / 1e6:,.1f}M parameters"
    yield f"  {'MiB' if unit == MIB else 'GiB':<18}" + "".join(
        f"{phase.name:>10}" for phase in memory.phases
    )
    yield from _rows(memory, "device", unit)
    for place, name in PLACES.items():
        if memory.peak(place):
            yield f"  {name}"
            yield from _rows(memory, place, unit)
    yield f"  {describe_machine(machine)}"
    for short in left_out(memory, machine):
        yield f"  {LEFT_OUT[short.phase.name]} is left out: it {short}"
    yield from (f"  {sentence}" for sentence in memory.unknown)


def line(memory: StepMemory, machine: Machine) -> str:
    """The memory of the largest phase."""
    phases = [phase.least() for phase in memory.phases if not phase.optional]
    worst = max(phases, key=lambda phase: phase.peak("device"))
    (needed,) = in_words(worst.peak("device"))
    more = " and more, which is not counted" if memory.unknown else ""
    host = max(phase.peak("host") for phase in phases)
    beside = f", {in_words(host)[0]} of main memory" if host and machine.has_gpu else ""
    each = "on each GPU" if machine.has_gpu else "in each process"
    return f"about {needed} {each} (to {worst.name}){beside}{more}"


def describe_machine(machine: Machine) -> str:
    """The memory of a machine."""
    parts: list[str] = []
    if machine.gpu_bytes is not None:
        parts.append(f"{in_words(machine.gpu_bytes)[0]} on each GPU")
    elif machine.has_gpu:
        parts.append("GPUs whose memory is not known")
    if machine.host_bytes is not None:
        count = machine.processes
        processes = "1 process" if count == 1 else f"{count} processes"
        parts.append(f"{in_words(machine.host_bytes)[0]} of main memory for {processes}")
    return f"{machine.name} has {' and '.join(parts) or 'memory that is not known'}"


def _rows(memory: StepMemory, place: Place, unit: int) -> Iterator[str]:
    by_phase = [phase.by_kind(place) for phase in memory.phases]
    for kind in KINDS:
        if any(kind in kinds for kinds in by_phase):
            yield _row(kind.replace("_", " "), [kinds.get(kind, 0) for kinds in by_phase], unit)
            if kind == "weights":
                yield from _roles(memory, place, unit)
    yield _row("in all", [phase.peak(place) for phase in memory.phases], unit)


def _roles(memory: StepMemory, place: Place, unit: int) -> Iterator[str]:
    """Weights by role, where several models have some."""
    by_phase = [phase.weights(place) for phase in memory.phases]
    roles = [role for role in memory.parameters if any(role in each for each in by_phase)]
    if len(roles) > 1:
        for role in roles:
            yield _row(f"  {role}", [each.get(role, 0) for each in by_phase], unit)


def _row(name: str, sizes: list[int], unit: int) -> str:
    return f"  {name:<18}" + "".join(f"{size / unit:>10.1f}" for size in sizes)
