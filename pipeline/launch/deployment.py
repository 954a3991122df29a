"""The options that say on which machines the processes of a step run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import require

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
"""Without a password prompt; a connection that is lost is noticed within a minute."""

OF_SEVERAL = ("hostfile", "num_nodes", "min_nodes", "master_addr", "master_port", "node_rank")
"""Options that one machine alone does not have."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The options that say where processes run."""

    deployment_type: Literal["single_gpu", "single_node", "multi_node"] = "single_gpu"
    """One process, on the GPU if there is one; one process per GPU of this machine; or several
    machines, by --hostfile, inside a SLURM allocation, or by hand with --node-rank."""

    num_processes: int | None = None
    """Processes of single_node. Without it, one per GPU, or 2 where there is none."""

    hostfile: Path | None = None
    """Machines of multi_node, as DeepSpeed writes them: `worker-0 slots=8` a line. ssh must reach
    each without a password, and each must have the same files at the same paths."""

    include: str | None = None
    """Hosts and slots to take: worker-0@worker-1:0,2 has all slots of worker-0 and two of worker-1.
    With single_node, GPUs of this machine: localhost:0,2."""

    exclude: str | None = None
    """Hosts and slots to leave out, written as for --include."""

    num_nodes: int | None = None
    """Machines of multi_node: the first that many of --hostfile, or all there are by hand."""

    min_nodes: int | None = None
    """Goes on, from the last checkpoint, while at least that many machines are there, the first one
    among them. Without it all are needed."""

    num_gpus: int | None = None
    """Processes on each machine: the first that many slots of each host."""

    master_addr: str | None = None
    """Address of the first machine, where processes meet. Without it, the first host's name."""

    master_port: int | None = None
    """Port of the first machine. Without it 29500, or another one where that is taken."""

    node_rank: int | None = None
    """Starts multi_node by hand: the same command on each machine, with 0, 1, ... here. Number 0 is
    the machine of --master-addr."""

    ssh_command: str = SSH
    """How a host is reached; its name and a command line for its shell are added. For a port or a
    key: "ssh -p 2222 -i KEY"."""

    env_file: Path | None = None
    """Lines NAME=VALUE that the processes on all machines see. Without it ~/.deepspeed_env, where
    it exists. Variables of libraries, such as NCCL_*, are passed on without it."""

    bind_cores: bool = False
    """Give each process cores of its own, all hyper-threads of one core to the same process."""

    log_dir: Path | None = None
    """Directory that gets the output of each process in a file, below the name of its host."""

    no_check: bool = False
    """Begin multi_node without looking at the machines first."""

    def __post_init__(self) -> None:
        many = self.deployment_type == "multi_node"
        require(
            self.num_processes is None or self.deployment_type == "single_node",
            "--num-processes needs --deployment-type single_node"
            + ("; --num-gpus counts the processes on each machine" if many else ""),
        )
        for name in ("num_processes", "num_gpus", "num_nodes", "min_nodes"):
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            require(value is None or value > 0, f"{option} must be above 0, got {value}")
        for name in OF_SEVERAL:
            require(
                many or getattr(self, name) is None,
                f"--{name.replace('_', '-')} needs --deployment-type multi_node",
            )
        for name in ("include", "exclude", "num_gpus", "bind_cores", "log_dir"):
            require(
                self.deployment_type != "single_gpu" or not getattr(self, name),
                f"--{name.replace('_', '-')} needs --deployment-type single_node or multi_node",
            )
        require(
            self.include is None or self.exclude is None,
            "--include and --exclude can't be combined; what --include does not name is left out",
        )
        option = "--include" if self.include else "--exclude"
        require(
            self.filters is None or (self.num_gpus is None and self.num_processes is None),
            f"{option} names the slots; omit"
            f" {'--num-gpus' if self.num_gpus else '--num-processes'}",
        )
        require(
            self.filters is None or self.num_nodes is None,
            f"{option} names the hosts; omit --num-nodes",
        )
        require(
            self.num_gpus is None or self.num_processes is None,
            "--num-gpus and --num-processes say the same; give one",
        )
        require(
            self.master_port is None or 0 < self.master_port < 65536,
            f"--master-port must be from 1 to 65535, got {self.master_port}",
        )

    @property
    def filters(self) -> str | None:
        """What --include or --exclude says, if one of them does."""
        return self.include or self.exclude
