"""The machines of a job: DeepSpeed's host files, and its grammar of what to take of them.

    worker-0 slots=8        # one host a line, with the processes it can run: its GPUs
    worker-1 slots=8

`--include worker-0@worker-1:0,2` takes all slots of worker-0 and two of worker-1, `--exclude` takes
what it does not name, and `4-7` stands for `4,5,6,7`.
"""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import ConfigError, suggestion

LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)")
NAME = re.compile(r"[\w.@\[\]:%-]+")
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """One machine."""

    name: str
    """As ssh takes it."""

    slots: tuple[int, ...]
    """Its devices that are used, one process each, in order."""

    place: str = ""
    """Where it is written, for error messages: `hosts:2`."""

    @property
    def is_whole(self) -> bool:
        """Whether the slots are the first ones, so that no device has to be hidden."""
        return self.slots == tuple(range(len(self.slots)))


def is_this_machine(name: str) -> bool:
    """Whether a host's name is that of the machine we run on."""
    own = socket.gethostname()
    return name in (*THIS_MACHINE, own, own.partition(".")[0])


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file, in its order.

    Raises:
        ConfigError: the file or a line of it can't be used; the sentence begins with its place.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(f"--hostfile {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} can't be read: {error}") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].strip()
        if words:
            host = _host(words, f"{path}:{number}")
            if host.name in hosts:
                raise ConfigError(
                    f"{host.place}: {host.name} stands in line"
                    f" {hosts[host.name].place.rpartition(':')[2]} already; name each host once,"
                    " with all its slots"
                )
            hosts[host.name] = host
    if not hosts:
        raise ConfigError(f"--hostfile {path} names no host; a line is `worker-0 slots=8`")
    return list(hosts.values())


def select_hosts(
    hosts: Sequence[Host],
    *,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> list[Host]:
    """The hosts and slots that the options leave, in the order of the file.

    Raises:
        ConfigError: an option is malformed, names what is not there, or leaves nothing.
    """
    if include is not None:
        named = _filter("--include", include, hosts)
        hosts = [
            replace(host, slots=tuple(slot for slot in host.slots if slot in named[host.name]))
            for host in hosts
            if host.name in named
        ]
    if exclude is not None:
        named = _filter("--exclude", exclude, hosts)
        hosts = [
            replace(host, slots=tuple(each for each in host.slots if each not in left_out))
            for host in hosts
            for left_out in [named.get(host.name, ())]
        ]
        hosts = [host for host in hosts if host.slots]
        if not hosts:
            raise ConfigError(f"--exclude {exclude} leaves no host")
    if num_nodes is not None:
        if num_nodes > len(hosts):
            raise ConfigError(f"--num-nodes {num_nodes} is more than the {_count(hosts)}")
        hosts = hosts[:num_nodes]
    if num_gpus is not None:
        for host in hosts:
            if num_gpus > len(host.slots):
                raise ConfigError(
                    f"--num-gpus {num_gpus} is more than the {len(host.slots)} slots of {host.name}"
                    f" ({host.place})"
                )
        hosts = [replace(host, slots=host.slots[:num_gpus]) for host in hosts]
    return list(hosts)


def _host(words: str, place: str) -> Host:
    match = LINE.fullmatch(words)
    if match is None:
        raise ConfigError(f"{place}: {_mistake(words)}; a line is `worker-0 slots=8`")
    name, slots = match["name"], int(match["slots"])
    if not NAME.fullmatch(name) or name.startswith("-"):
        raise ConfigError(f"{place}: {name} is not a name of a host")
    if slots == 0:
        raise ConfigError(f"{place}: {name} has slots=0; leave the line out, or give it slots")
    return Host(name, tuple(range(slots)), place)


def _mistake(words: str) -> str:
    """What is wrong with a line of a host file."""
    name, _, rest = words.partition(" ")
    if words.startswith("//"):
        return "comments begin with #, not //"
    if not rest:
        return f"{name} has no slots"
    value = re.match(r"slots=(\S*)", rest.strip())
    if value is None:
        return f"{rest.strip()!r} after {name} is not understood"
    if not value[1].isdigit():
        return f"slots={value[1]} of {name} is not a whole number"
    extra = rest.strip()[value.end() :].strip()
    return f"{extra!r} after slots={value[1]} is not understood"


def _filter(option: str, text: str, hosts: Sequence[Host]) -> Mapping[str, tuple[int, ...]]:
    """Slots by host as `worker-0@worker-1:0,2` names them."""
    there = {host.name: host for host in hosts}
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, slots = part.strip().partition(":")
        wrong = f"{option} {text}: "
        if not name or (colon and not slots):
            raise ConfigError(
                f"{wrong}{part.strip() or 'nothing'} between two @ names no host or slot; it is"
                " written worker-0@worker-1:0,2"
            )
        if name not in there:
            raise ConfigError(f"{wrong}no host is called {name}; {suggestion(name, there)}")
        if name in named:
            raise ConfigError(f"{wrong}{name} is named twice; give all its slots at once")
        host = there[name]
        named[name] = _slots(slots, wrong) if colon else host.slots
        missing = [slot for slot in named[name] if slot not in host.slots]
        if missing:
            place = f" ({host.place})" if host.place else ""
            raise ConfigError(
                f"{wrong}{name} has no slot {missing[0]}, only {_shown(host.slots)}{place}"
            )
    return named


def _slots(text: str, wrong: str) -> tuple[int, ...]:
    """`0,2` or `4-7`."""
    slots: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ConfigError(
                f"{wrong}{part.strip()!r} is not a slot; slots are numbers, as in worker-1:0,2 or"
                " worker-1:4-7"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{wrong}{part.strip()} runs backwards")
        slots += range(first, last + 1)
    return tuple(slots)


def _shown(slots: Sequence[int]) -> str:
    if len(slots) > 2 and slots == tuple(range(slots[0], slots[-1] + 1)):
        return f"{slots[0]}-{slots[-1]}"
    return ",".join(str(slot) for slot in slots)


def _count(hosts: Sequence[Host]) -> str:
    return "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
