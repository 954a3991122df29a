"""Placement of the processes of a step: this machine, a host file, SLURM, Ray or Kubernetes.

A host file has DeepSpeed's format, one machine per line with its slots (usually GPUs):

    worker-0 slots=8
    worker-1 slots=8

`--include worker-0@worker-1:0,2` takes all slots of worker-0 and two of worker-1, `--exclude` takes
all slots that it does not name, and `4-7` is `4,5,6,7`.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pipeline.cli.options import option_name
from pipeline.launch.local import CPU_PROCESSES, count_processes, list_gpus
from pipeline.system.errors import ConfigError, counted, require, suggestion

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
"""ssh without a password prompt; it detects a lost connection within a minute."""

RESTRICTED_OPTIONS = (
    (("hostfile", "master_addr", "master_port"), "multi_node"),
    (("image", "volume"), "kubernetes"),
    (("num_nodes",), "multi_node, ray or kubernetes"),
    (("include", "exclude"), "single_node or multi_node"),
    (("num_gpus",), "single_node, multi_node, ray or kubernetes"),
)
"""Options that only some types of deployment accept."""

EXCLUSIVE_OPTIONS = (
    ("include", "exclude"),
    *((name, other) for name in ("include", "exclude") for other in ("num_gpus", "num_nodes")),
    *((name, "num_processes") for name in ("include", "exclude", "num_gpus")),
)
"""Pairs of mutually exclusive options."""

PORT = 29500
"""Default rendezvous port, as with torchrun and DeepSpeed."""

HOST_LINE = re.compile(r"(?P<name>[\w.@\[\]:%][\w.@\[\]:%-]*)\s+slots=(?P<slots>[1-9]\d*)")
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
NODE_PATTERN = r"[\w.-]+(?:\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\][\w.-]*)?"
"""One item of SLURM's node list."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Options that determine where processes run."""

    deployment_type: Literal["single_gpu", "single_node", "multi_node", "ray", "kubernetes"] = (
        "single_gpu"
    )
    """One process, on the GPU if there is one; one process per GPU of this machine; several
    machines, from --hostfile or a SLURM allocation; the nodes of a Ray cluster; or the pods of a
    Kubernetes JobSet, for which only the manifest is written: OUTPUT_DIR/jobset.yaml."""

    image: str | None = None
    """Container image for kubernetes, with this package installed."""

    volume: str | None = None
    """PersistentVolumeClaim for kubernetes, mounted as the working directory of all pods."""

    num_processes: int | None = None
    """Number of processes for single_node; by default one per GPU, or 2 without a GPU."""

    hostfile: Path | None = None
    """Machines for multi_node in DeepSpeed's format, such as `worker-0 slots=8`, one per line. ssh
    must reach each without a password, and each must have the same files at the same paths."""

    include: str | None = None
    """Hosts and slots to use: worker-0@worker-1:0,2 is all slots of worker-0 and two of worker-1.
    With single_node, GPUs of this machine: localhost:0,2."""

    exclude: str | None = None
    """Hosts and slots to exclude, written as for --include."""

    num_nodes: int | None = None
    """Number of machines for multi_node (the first ones) or nodes for ray, by default all; or of
    pods for kubernetes, which requires it."""

    num_gpus: int | None = None
    """Number of processes, with one GPU each, on each machine (from its first slot) or in each pod.
    With ray in a cluster without GPUs, each process uses one CPU."""

    master_addr: str | None = None
    """Address of the first machine, for the rendezvous. By default the first host's name."""

    master_port: int | None = None
    """Port on the first machine. By default 29500 or, with SLURM, one from 29500 to 30499 that
    depends on the job."""

    ssh_command: str = SSH
    """Command to reach a host; its name and a command line for its shell are appended. For a port
    or a key: "ssh -p 2222 -i KEY"."""

    no_check: bool = False
    """Start multi_node without checking the machines first."""

    def __post_init__(self) -> None:
        is_multi_node = self.deployment_type == "multi_node"
        require(
            self.num_processes is None or self.deployment_type == "single_node",
            "--num-processes needs --deployment-type single_node"
            + ("; --num-gpus sets the processes per machine" if is_multi_node else ""),
        )
        for name in ("num_processes", "num_gpus", "num_nodes"):
            value = getattr(self, name)
            require(
                value is None or value > 0, f"{option_name(name)} must be positive, got {value}"
            )
        for names, types in RESTRICTED_OPTIONS:
            for name in names:
                require(
                    self.deployment_type in types or getattr(self, name) is None,
                    f"{option_name(name)} needs --deployment-type {types}",
                )
        for name in ("image", "volume", "num_nodes", "num_gpus"):
            require(
                self.deployment_type != "kubernetes" or bool(getattr(self, name)),
                f"--deployment-type kubernetes needs {option_name(name)}",
            )
        for name, other in EXCLUSIVE_OPTIONS:
            require(
                getattr(self, name) is None or getattr(self, other) is None,
                f"{option_name(name)} can't be combined with {option_name(other)}; omit"
                f" {option_name(other)}",
            )
        require(
            self.master_port is None or 0 < self.master_port < 65536,
            f"--master-port must be from 1 to 65535, got {self.master_port}",
        )

    @property
    def host_filter(self) -> str | None:
        """The value of --include or --exclude, if one of them is given."""
        return self.include or self.exclude


@dataclass(frozen=True)
class Host:
    """One machine."""

    name: str
    """Host name, as passed to ssh."""

    slots: tuple[int, ...]
    """Devices used on the host, one process each, in order."""

    location: str = ""
    """Line in the host file, for error messages: `hosts:2`."""

    @property
    def has_first_slots(self) -> bool:
        """Whether the slots are the host's first ones, so that no device needs to be hidden."""
        return self.slots == tuple(range(len(self.slots)))


@dataclass(frozen=True)
class Layout:
    """Placement of the processes of a step."""

    launcher: Literal["process", "node", "ssh", "slurm", "ray", "pod"]
    """The launcher: Python alone, torchrun on this machine, torchrun on each machine through ssh,
    srun or Ray, or `train.py` in each pod of an indexed Job."""

    hosts: tuple[Host, ...] = ()
    """The machines in the order of their node ranks; empty for the launcher `process`."""

    address: str = "127.0.0.1"
    port: int = PORT

    rank: int = 0
    """Rank of this pod."""

    @property
    def processes(self) -> int | None:
        """Number of processes of the step; None for a single one without torchrun."""
        return None if self.launcher == "process" else sum(len(host.slots) for host in self.hosts)

    def __str__(self) -> str:
        is_local = self.launcher in ("process", "node")
        machines = "" if is_local else f" on {counted(len(self.hosts), 'machine')}"
        return f"{counted(self.processes or 1, 'process')} each{machines}"


def resolve_layout(deployment: Deployment, environment: Mapping[str, str] = os.environ) -> Layout:
    """Return the placement of a step's processes from the options and a scheduler's environment.

    Raises:
        ConfigError: the options name no machines, or machines that don't exist.
    """
    if deployment.deployment_type == "single_gpu":
        return Layout("process")
    if deployment.deployment_type == "single_node":
        return Layout("node", (_local_host(deployment),))
    if deployment.deployment_type == "ray":
        return _ray_layout(deployment)
    if deployment.hostfile is not None:
        return _ssh_layout(deployment)
    if "SLURM_JOB_ID" in environment:
        return _slurm_layout(deployment, environment)
    if "JOB_COMPLETION_INDEX" in environment:
        return _pod_layout(deployment, int(environment["JOB_COMPLETION_INDEX"]))
    raise ConfigError("--deployment-type multi_node needs --hostfile FILE, or a SLURM allocation")


def is_this_machine(name: str) -> bool:
    """Return whether a host's name refers to this machine."""
    hostname = socket.gethostname()
    return name in (*THIS_MACHINE, hostname, hostname.partition(".")[0])


def _local_host(deployment: Deployment) -> Host:
    if deployment.host_filter is None:
        option = "--num-processes" if deployment.num_gpus is None else "--num-gpus"
        number = count_processes(deployment.num_processes or deployment.num_gpus, option=option)
        return Host("localhost", tuple(range(number)))
    all_slots = Host("localhost", tuple(range(len(list_gpus(hidden=True)) or CPU_PROCESSES)))
    (host,) = select_hosts([all_slots], include=deployment.include, exclude=deployment.exclude)
    return host


def _ssh_layout(deployment: Deployment) -> Layout:
    hosts = select_hosts(
        read_hostfile(deployment.hostfile or Path()),
        include=deployment.include,
        exclude=deployment.exclude,
        num_nodes=deployment.num_nodes,
        num_gpus=deployment.num_gpus,
    )
    local = [host for host in hosts if host.name in THIS_MACHINE]
    if local and len(hosts) > 1:
        raise ConfigError(
            f"{local[0].location}: {local[0].name} is a different machine on every host; use the"
            " name by which the others reach it"
        )
    address = deployment.master_addr or hosts[0].name.rpartition("@")[2]
    port = deployment.master_port or PORT
    return Layout("ssh", tuple(hosts), address, port)


def _slurm_layout(deployment: Deployment, environment: Mapping[str, str]) -> Layout:
    require(
        deployment.host_filter is None,
        "--include and --exclude need --hostfile; SLURM has its own --nodelist and --exclude",
    )
    names = expand_nodelist(environment.get("SLURM_JOB_NODELIST", ""))
    num_nodes, count = deployment.num_nodes or len(names), len(names)
    limit = counted(count, "allocated node")
    require(num_nodes <= count, f"--num-nodes {num_nodes} exceeds the {limit}")
    match = re.search(r"\d+$", environment.get("SLURM_GPUS_ON_NODE", ""))
    num_slots = deployment.num_gpus or (int(match[0]) if match else 0) or count_processes(None)
    hosts = tuple(Host(name, tuple(range(num_slots))) for name in names[:num_nodes])
    # Jobs may share a machine; job IDs give them different ports.
    port = deployment.master_port or PORT + int(environment["SLURM_JOB_ID"]) % 1000
    return Layout("slurm", hosts, deployment.master_addr or names[0], port)


def _pod_layout(deployment: Deployment, rank: int) -> Layout:
    nodes, gpus, address = deployment.num_nodes, deployment.num_gpus, deployment.master_addr
    if nodes is None or gpus is None or address is None:
        raise ConfigError("a pod of an indexed Job needs --num-nodes, --num-gpus and --master-addr")
    hosts = tuple(Host(f"pod {i}", tuple(range(gpus))) for i in range(nodes))
    return Layout("pod", hosts, address, deployment.master_port or PORT, rank)


def _ray_layout(deployment: Deployment) -> Layout:
    require(
        find_spec("ray") is not None,
        '--deployment-type ray needs the package ray: pip install "rlhf-pipeline[ray]"',
    )
    nodes, gpus = deployment.num_nodes, deployment.num_gpus
    if nodes is None or gpus is None:
        from pipeline.launch.ray_cluster import count_nodes

        nodes, gpus = count_nodes(nodes, gpus)
    return Layout("ray", tuple(Host(f"node {i}", tuple(range(gpus))) for i in range(nodes)))


def expand_nodelist(text: str) -> list[str]:
    """Expand SLURM's notation `node[01-03,7],login` to names.

    Raises:
        ConfigError: the list is empty or malformed.
    """
    if not re.fullmatch(f"{NODE_PATTERN}(,{NODE_PATTERN})*", text):
        raise ConfigError(
            f"SLURM_JOB_NODELIST {text!r} is not a list of hosts; run this inside sbatch or salloc"
        )
    names: list[str] = []
    for part in re.finditer(NODE_PATTERN, text):
        prefix, bracket, rest = part[0].partition("[")
        inside, _, suffix = rest.partition("]")
        for item in inside.split(",") if bracket else [""]:
            first, _, last = item.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else [""]
            names += [f"{prefix}{str(number).zfill(len(first))}{suffix}" for number in numbers]
    return names


def read_hostfile(path: Path) -> list[Host]:
    """Read the hosts of a file, in order.

    Raises:
        ConfigError: the file or a line can't be used; the message begins with its location.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} can't be read: {error}") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = HOST_LINE.fullmatch(content)
        if match is None:
            raise ConfigError(f"{path}:{number}: expected `worker-0 slots=8`, got {content!r}")
        name = match["name"]
        require(name not in hosts, f"{path}:{number}: {name} is listed twice; merge the lines")
        hosts[name] = Host(name, tuple(range(int(match["slots"]))), f"{path}:{number}")
    require(bool(hosts), f"--hostfile {path} has no hosts; write lines such as `worker-0 slots=8`")
    return list(hosts.values())


def select_hosts(
    hosts: Sequence[Host],
    *,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> list[Host]:
    """Return the hosts and slots that the options select, in the order of the file.

    Raises:
        ConfigError: an option is malformed, names an unknown host or slot, or leaves nothing.
    """
    if include is not None:
        selected = _parse_filter("--include", include, hosts)
        hosts = [replace(h, slots=selected[h.name]) for h in hosts if h.name in selected]
    if exclude is not None:
        selected = _parse_filter("--exclude", exclude, hosts)
        hosts = [
            replace(host, slots=tuple(slot for slot in host.slots if slot not in excluded))
            for host in hosts
            for excluded in [selected.get(host.name, ())]
        ]
        hosts = [host for host in hosts if host.slots]
        require(bool(hosts), f"--exclude {exclude} leaves no host")
    if num_nodes is not None:
        count = len(hosts)
        limit = counted(count, "host")
        require(num_nodes <= count, f"--num-nodes {num_nodes} exceeds the {limit} in --hostfile")
        hosts = hosts[:num_nodes]
    if num_gpus is not None:
        for host in hosts:
            require(
                num_gpus <= len(host.slots),
                f"--num-gpus {num_gpus} exceeds the {counted(len(host.slots), 'slot')} of"
                f" {host.name} ({host.location})",
            )
        hosts = [replace(host, slots=host.slots[:num_gpus]) for host in hosts]
    return list(hosts)


def _parse_filter(option: str, text: str, hosts: Sequence[Host]) -> Mapping[str, tuple[int, ...]]:
    """Parse the notation `worker-0@worker-1:0,2` into slots by host."""
    known = {host.name: host for host in hosts}
    selected: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        match = re.fullmatch(r"([^:\s]+)(?::(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*))?", part.strip())
        if match is None:
            raise ConfigError(f"{option} {text}: write hosts and slots as worker-0@worker-1:0,2-3")
        name, slots = match[1], match[2]
        if name not in known:
            raise ConfigError(
                f"{option} {text}: there is no host {name}; {suggestion(name, known)}"
            )
        require(name not in selected, f"{option} {text}: {name} is listed twice")
        host = known[name]
        chosen = host.slots
        if slots is not None:
            ranges = [item.partition("-") for item in slots.split(",")]
            numbers = {n for a, _, b in ranges for n in range(int(a), int(b or a) + 1)}
            missing = sorted(numbers - set(host.slots))
            require(
                not missing and bool(numbers),
                f"{option} {text}: {name} has no slot {missing[0] if missing else slots}; its last"
                f" slot is {host.slots[-1]}{f' ({host.location})' if host.location else ''}",
            )
            chosen = tuple(sorted(numbers))
        selected[name] = chosen
    return selected
