"""Virtual machines on this one: addresses, host names, processes, and a link that can be cut.

Each is a network namespace of Linux, whose programs see nothing of the others but what comes over
the network. It takes root to make them.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

NET = "10.99.{}.{}"


def can_be_made() -> bool:
    """Whether this system lets us make machines."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        return False
    made = subprocess.run(["unshare", "-n", "-u", "-m", "-p", "-f", "true"], check=False)
    return made.returncode == 0


class Machines:
    """Two machines, `worker-0` and `worker-1`, with a cable between them."""

    def __init__(self, directory: Path) -> None:
        self.names = ("worker-0", "worker-1")
        self._own = f"m{os.getpid()}"
        third = os.getpid() % 250
        self.addresses = [NET.format(third, number) for number in (1, 2)]
        self.ssh = directory / "ssh"
        """Stands for ssh: takes a host and a line, and runs the line there."""
        names = directory / "names"
        names.write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{a} {n}\n" for a, n in zip(self.addresses, self.names, strict=True))
        )
        self.ssh.write_text(
            "#!/bin/sh\n"
            f'exec ip netns exec {self._own}"${{1#worker}}" unshare --uts --mount --pid --fork'
            " --kill-child --mount-proc sh -c '"
            f'hostname "$0"; mount --bind {names} /etc/hosts; exec sh -c "$1"\' "$1" "$2"\n'
        )
        self.ssh.chmod(0o755)

    def __enter__(self) -> "Machines":
        ends = [f"{self._own}v{number}" for number in (0, 1)]
        for number in (0, 1):
            _ip("netns", "add", self._netns(number))
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, end in enumerate(ends):
            netns = self._netns(number)
            _ip("link", "set", end, "netns", netns)
            _ip("-n", netns, "addr", "add", f"{self.addresses[number]}/24", "dev", end)
            _ip("-n", netns, "link", "set", "lo", "up")
            _ip("-n", netns, "link", "set", end, "up")
        return self

    def __exit__(self, *_error: object) -> None:
        for number in (0, 1):
            _ip("netns", "delete", self._netns(number))

    def hostfile(self, directory: Path, *, slots: int = 1) -> Path:
        """A host file of both."""
        file = directory / "hosts"
        file.write_text("".join(f"{name} slots={slots}\n" for name in self.names))
        return file

    def run(self, name: str, *words: str) -> Sequence[str]:
        """The command line that runs another one on a machine."""
        return [str(self.ssh), name, " ".join(words)]

    def cut(self) -> None:
        """Cut the cable: packets are lost without notice."""
        self._cable("down")

    def reconnect(self) -> None:
        """Put it together again."""
        self._cable("up")

    def kill(self, name: str) -> None:
        """End all that runs on a machine, as when its power fails."""
        netns = self._netns(self.names.index(name))
        for pid in _ip("netns", "pids", netns).split():
            try:
                psutil.Process(int(pid)).kill()
            except psutil.NoSuchProcess:
                continue

    def _cable(self, state: str) -> None:
        _ip("-n", self._netns(1), "link", "set", f"{self._own}v1", state)

    def _netns(self, number: int) -> str:
        return f"{self._own}-{number}"


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
