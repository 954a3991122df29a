"""The bytes of a step in words: a table by phase and kind, and one line."""

from collections.abc import Iterator

from pipeline.budget.fit import in_words, left_out
from pipeline.budget.machine import GIB, MIB, Machine
from pipeline.budget.table import KINDS, Place, StepMemory

LEFT_OUT = {"compare": "the comparison with the base model"}
"""What the phases that may be left out are for, by name."""

PLACES: dict[Place, str] = {"host": "in main memory", "disk": "on the disk"}


def table(memory: StepMemory, machine: Machine) -> Iterator[str]:
    """Kinds down, phases across; what lies elsewhere than where the model computes comes after."""
    unit = GIB if memory.peak("device") >= GIB else MIB
    for role, count in (memory.parameters or {}).items():
        yield f"  {role:<18} {count / 1e6:,.1f}M parameters"
    if memory.stage is not None:
        yield f"  stage {memory.stage} of the pipeline, which takes most"
    yield f"  {'MiB' if unit == MIB else 'GiB':<18}" + "".join(
        f"{phase.name:>10}" for phase in memory.phases
    )
    yield from _rows(memory, "device", unit)
    yield _row("at most", [phase.peak("device") for phase in memory.phases], unit)
    for place, name in PLACES.items():
        if memory.peak(place):
            yield f"  {name}"
            yield from _rows(memory, place, unit)
            yield _row("at most", [phase.peak(place) for phase in memory.phases], unit)
    yield f"  {there(machine)}"
    for short in left_out(memory, machine):
        yield f"  {LEFT_OUT[short.phase.name]} is left out: it {short}"
    yield from (f"  {sentence}" for sentence in memory.unknown)


def line(memory: StepMemory, machine: Machine) -> str:
    """What the step takes at its worst, of what there is."""
    if not memory.phases:
        return "not counted"
    phases = [phase.least() for phase in memory.phases if not phase.optional]
    worst = max(phases, key=lambda phase: phase.peak("device"))
    (needed,) = in_words(worst.peak("device"))
    more = " and more, which is not counted" if memory.unknown else ""
    host = max(phase.peak("host") for phase in phases)
    beside = f", {in_words(host)[0]} of main memory" if host and machine.has_gpu else ""
    each = "on each GPU" if machine.has_gpu else "in each process"
    stage = "" if memory.stage is None else f" of stage {memory.stage}"
    return f"at most {needed} {each}{stage} (to {worst.name}){beside}{more}"


def there(machine: Machine) -> str:
    """What the machine has."""
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


def _roles(memory: StepMemory, place: Place, unit: int) -> Iterator[str]:
    """The roles whose weights these are, where several models have some."""
    by_phase = [phase.weights(place) for phase in memory.phases]
    roles = [role for role in memory.parameters or {} if any(role in each for each in by_phase)]
    if len(roles) > 1:
        for role in roles:
            yield _row(f"  {role}", [each.get(role, 0) for each in by_phase], unit)


def _row(name: str, sizes: list[int], unit: int) -> str:
    return f"  {name:<18}" + "".join(f"{size / unit:>10.1f}" for size in sizes)
