"""Where the processes of a step run, as the options and a SLURM allocation have it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import ConfigError, require
from pipeline.launch.deployment import Deployment
from pipeline.launch.hosts import THIS_MACHINE, Host, read_hostfile, select_hosts
from pipeline.launch.local import CPU_PROCESSES, count_gpus, count_processes

PORT = 29500
"""Where processes meet, as torchrun and DeepSpeed have it."""

NODES = r"[\w.-]+(?:\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\][\w.-]*)?"
"""One part of SLURM's list of names."""


@dataclass(frozen=True)
class Layout:
    """Where the processes of a step run."""

    by: Literal["process", "node", "ssh", "slurm", "hand"]
    """What starts them: nothing but Python, torchrun on this machine, or torchrun on each machine
    through ssh, through srun, or through the people at them."""

    hosts: tuple[Host, ...] = ()
    """The machines, the first one first. By hand only their number counts."""

    fewest: int = 1
    """Machines with which a job of a changing number of them goes on."""

    address: str = "127.0.0.1"
    port: int = PORT

    @property
    def processes(self) -> int | None:
        """All processes of a step; None runs one without torchrun."""
        return None if self.by == "process" else sum(len(host.slots) for host in self.hosts)

    @property
    def is_elastic(self) -> bool:
        """Whether machines may come and go."""
        return self.fewest < len(self.hosts)

    def __str__(self) -> str:
        processes = "1 process" if (self.processes or 1) == 1 else f"{self.processes} processes"
        machines = "1 machine" if len(self.hosts) == 1 else f"{len(self.hosts)} machines"
        return f"{processes} each" + ("" if self.by in ("process", "node") else f" on {machines}")


def layout(deployment: Deployment, environment: Mapping[str, str] = os.environ) -> Layout:
    """Where the processes of a step run, by the options and, for SLURM, the environment.

    Raises:
        ConfigError: the options name no machines, or they are not there.
    """
    if deployment.deployment_type == "single_gpu":
        return Layout("process")
    if deployment.deployment_type == "single_node":
        return Layout("node", (_this_machine(deployment),))
    if deployment.node_rank is not None:
        return _by_hand(deployment)
    if deployment.hostfile is not None:
        return _by_ssh(deployment)
    if "SLURM_JOB_ID" in environment:
        return _by_slurm(deployment, environment)
    raise ConfigError(
        "--deployment-type multi_node needs --hostfile FILE, or a SLURM allocation, or on each"
        " machine --node-rank with --num-nodes and --master-addr"
    )


def _this_machine(deployment: Deployment) -> Host:
    if deployment.include is None and deployment.exclude is None:
        if deployment.num_gpus is not None:
            gpus = count_gpus()
            if 0 < gpus < deployment.num_gpus:
                raise ConfigError(
                    f"--num-gpus {deployment.num_gpus} is more than the {gpus} GPUs of this machine"
                )
            return Host("localhost", tuple(range(deployment.num_gpus)))
        return Host("localhost", tuple(range(count_processes(deployment.num_processes))))
    whole = Host("localhost", tuple(range(count_gpus(hidden=True) or CPU_PROCESSES)))
    (host,) = select_hosts([whole], include=deployment.include, exclude=deployment.exclude)
    return host


def _by_ssh(deployment: Deployment) -> Layout:
    hosts = read_hostfile(deployment.hostfile or Path())
    hosts = select_hosts(
        hosts,
        include=deployment.include,
        exclude=deployment.exclude,
        num_nodes=deployment.num_nodes,
        num_gpus=deployment.num_gpus,
    )
    local = [host for host in hosts if host.name in THIS_MACHINE]
    if local and len(hosts) > 1:
        raise ConfigError(
            f"{local[0].place}: {local[0].name} is another machine for every host that hears it;"
            " write the name by which the others reach it"
        )
    address = deployment.master_addr or hosts[0].name.rpartition("@")[2]
    port = deployment.master_port or PORT
    return Layout("ssh", tuple(hosts), _fewest(deployment, len(hosts)), address, port)


def _by_hand(deployment: Deployment) -> Layout:
    if deployment.hostfile is not None:
        given = _by_ssh(deployment)
        fewest, hosts, address = given.fewest, given.hosts, given.address
    else:
        most = deployment.num_nodes or 0
        require(most > 0, "--node-rank needs --num-nodes, how many machines there are")
        require(deployment.master_addr is not None, "--node-rank needs --master-addr, of machine 0")
        each = deployment.num_gpus or count_processes(None)
        hosts = tuple(Host(f"machine {rank}", tuple(range(each))) for rank in range(most))
        fewest, address = _fewest(deployment, most), deployment.master_addr or ""
    rank = deployment.node_rank or 0
    require(
        0 <= rank < len(hosts),
        f"--node-rank must be from 0 to {len(hosts) - 1}, one for each machine, got {rank}",
    )
    return Layout("hand", hosts, fewest, address, deployment.master_port or PORT)


def _by_slurm(deployment: Deployment, environment: Mapping[str, str]) -> Layout:
    for option in ("include", "exclude"):
        require(
            getattr(deployment, option) is None,
            f"--{option} needs --hostfile; SLURM has its own --nodelist and --exclude",
        )
    names = expand_nodelist(environment.get("SLURM_JOB_NODELIST", ""))
    most = deployment.num_nodes or len(names)
    if most > len(names):
        raise ConfigError(f"--num-nodes {most} is more than the {len(names)} of the allocation")
    gpus = re.search(r"\d+$", environment.get("SLURM_GPUS_ON_NODE", ""))
    each = deployment.num_gpus or (int(gpus[0]) if gpus else 0) or count_processes(None)
    hosts = tuple(Host(name, tuple(range(each))) for name in names[:most])
    # Jobs of one user may share a machine; their numbers tell them apart.
    port = deployment.master_port or PORT + int(environment["SLURM_JOB_ID"]) % 1000
    fewest = _fewest(deployment, most)
    return Layout("slurm", hosts, fewest, deployment.master_addr or names[0], port)


def _fewest(deployment: Deployment, most: int) -> int:
    """Machines with which a job goes on, of that many."""
    fewest = deployment.min_nodes or most
    require(fewest <= most, f"--min-nodes {fewest} is more than the {most} there are")
    return fewest


def expand_nodelist(text: str) -> list[str]:
    """The names that SLURM's `node[01-03,7],login` stands for.

    Raises:
        ConfigError: the list is empty or malformed.
    """
    if not re.fullmatch(f"{NODES}(,{NODES})*", text):
        raise ConfigError(
            f"SLURM_JOB_NODELIST {text!r} names no machine; run this inside sbatch or salloc"
        )
    names: list[str] = []
    for part in re.finditer(NODES, text):
        prefix, bracket, rest = part[0].partition("[")
        inside, _, suffix = rest.partition("]")
        for item in inside.split(",") if bracket else [""]:
            first, _, last = item.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else [""]
            names += [f"{prefix}{str(each).zfill(len(first))}{suffix}" for each in numbers]
    return names
