"""What stands in the way of a job on these machines, each in one sentence with its mend."""

from collections.abc import Iterator, Mapping, Sequence

from pipeline.launch.hosts import Host
from pipeline.launch.layout import Layout
from pipeline.launch.probe import Machine

CLOCK_SECONDS = 30.0
"""By which clocks may differ: logs and file times of several machines are compared by people."""

DISK_BYTES = 2**30
"""Free, at least; the models and their checkpoints usually take more."""

IN_USE = 0.1
"""Share of a GPU's memory from which on another job is taken to use it."""


def problems(
    machines: Mapping[Host, Machine],
    where: Layout,
    *,
    mark: str,
    directory: str,
    clocks: Mapping[Host, float],
) -> list[str]:
    """All that stands in the way, machine by machine; empty if nothing does.

    Args:
        machines: what each host reported, the first host first.
        where: where the processes are to run.
        mark: what the launcher has written into its directory of the output.
        directory: that directory.
        clocks: seconds by which each host's clock is ahead of the launcher's, as far as it is more
            than the time of asking explains.
    """
    first = next(iter(machines))
    found: list[str] = []
    for host, machine in machines.items():
        found += _versions(host, machine, first, machines[first])
        found += _devices(host, machine, has_gpus=any(each.gpus for each in machines.values()))
        found += _place(host, machine, mark, directory)
        if abs(clocks[host]) > CLOCK_SECONDS:
            found.append(
                f"the clock of {host.name} is {abs(clocks[host]):.0f} s"
                f" {'ahead' if clocks[host] > 0 else 'behind'}; set it, with NTP on all machines"
            )
        if host is not first:
            found += _way(host, machine, first, where)
    return found


def _versions(host: Host, machine: Machine, first: Host, other: Machine) -> Iterator[str]:
    own = {"Python": machine.python, **machine.packages}
    theirs = {"Python": other.python, **other.packages}
    for name, version in own.items():
        if version != theirs[name]:
            yield (
                f"{name} is {version} on {host.name} and {theirs[name]} on {first.name}; install"
                " the same on all machines"
            )
    if machine.code != other.code:
        yield (
            f"the code of this repository on {host.name} is not that on {first.name}; check out"
            " the same commit, without changes, on all machines"
        )


def _devices(host: Host, machine: Machine, *, has_gpus: bool) -> Iterator[str]:
    if not has_gpus:
        return
    there = len(machine.gpus)
    place = f" ({host.place})" if host.place else ""
    if max(host.slots) >= there:
        yield (
            f"{host.name} has {there} GPUs, and slot {max(host.slots)} is asked for{place}; correct"
            " its slots, or check its driver with nvidia-smi"
        )
        return
    for slot in host.slots:
        gpu = machine.gpus[slot]
        if gpu.used_mib > IN_USE * gpu.total_mib:
            yield (
                f"GPU {slot} of {host.name} has {gpu.used_mib / 1024:.1f} of"
                f" {gpu.total_mib / 1024:.0f} GiB in use; end that job, or leave the GPU out with"
                f" --exclude {host.name}:{slot}"
            )


def _place(host: Host, machine: Machine, mark: str, directory: str) -> Iterator[str]:
    if machine.shared != mark:
        yield (
            f"{host.name} does not see this machine's {directory}; put --output-dir on a file"
            " system that all machines share, at the same path"
        )
    elif machine.disk_bytes < DISK_BYTES:
        yield (
            f"{directory} has {machine.disk_bytes / 2**20:.0f} MiB free on {host.name}; make room,"
            " or choose another --output-dir"
        )


def _way(host: Host, machine: Machine, first: Host, where: Layout) -> Iterator[str]:
    """Does a machine find the first one?"""
    own = machine.own_address
    if own is None:
        yield (
            f"{host.name} does not know the name {where.address}, or has no way to it; give"
            f" --master-addr, an address of {first.name} that all machines reach"
        )
    elif own.startswith("127.") and not where.address.startswith("127."):
        yield (
            f"on {host.name} the name {where.address} means {host.name} itself; correct its"
            f" /etc/hosts, or give --master-addr, an address of {first.name}"
        )
    elif machine.reaches is False:
        yield (
            f"{host.name} can't reach port {where.port} of {where.address}; open it and the ports"
            " above 1024 between the machines, or give another --master-port or --master-addr"
        )


def table(machines: Mapping[Host, Machine], clocks: Mapping[Host, float]) -> Sequence[str]:
    """The machines side by side."""
    width = max(len("machine"), *(len(host.name) for host in machines))
    rows = [
        f"{'machine':<{width}}  {'python':<8} {'torch':<14} {'processes':>9}  {'GPUs':<26}"
        f" {'memory':>9} {'disk':>9} {'clock':>7}"
    ]
    for host, machine in machines.items():
        rows.append(
            f"{host.name:<{width}}  {machine.python:<8} {machine.packages['torch']:<14}"
            f" {len(host.slots):>9}  {_gpus(machine):<26} {machine.memory_bytes / 2**30:>5.0f} GiB"
            f" {machine.disk_bytes / 2**30:>5.0f} GiB {clocks[host]:>+5.0f} s"
        )
    return rows


def _gpus(machine: Machine) -> str:
    if not machine.gpus:
        return "none"
    kinds = sorted({gpu.name for gpu in machine.gpus})
    smallest = min(gpu.total_mib for gpu in machine.gpus) / 1024
    return f"{len(machine.gpus)} x {', '.join(kinds)}, {smallest:.0f} GiB"
