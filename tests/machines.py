"""Virtual machines with addresses, host names, processes, and a link that can be cut.

Each is a Linux network namespace, whose programs reach the others only over the network. Creating
them requires root.
"""

import os
import shutil
import subprocess
from pathlib import Path

import psutil

NET = "10.99.{}.{}"


def are_supported() -> bool:
    """Return whether this system can create machines."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        return False
    result = subprocess.run(["unshare", "-n", "-u", "-m", "-p", "-f", "true"], check=False)
    return result.returncode == 0


class Machines:
    """Two machines, `worker-0` and `worker-1`, with a cable between them."""

    def __init__(self, directory: Path) -> None:
        self.names = ("worker-0", "worker-1")
        self._prefix = f"m{os.getpid()}"
        subnet = os.getpid() % 250
        self.addresses = [NET.format(subnet, number) for number in (1, 2)]
        self.ssh = directory / "ssh"
        """Replaces ssh: runs a command line on a host."""
        names = directory / "names"
        names.write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{a} {n}\n" for a, n in zip(self.addresses, self.names, strict=True))
        )
        self.ssh.write_text(
            "#!/bin/sh\n"
            f'exec ip netns exec {self._prefix}"${{1#worker}}" unshare --uts --mount --pid --fork'
            " --kill-child --mount-proc sh -c '"
            f'hostname "$0"; mount --bind {names} /etc/hosts; exec sh -c "$1"\' "$1" "$2"\n'
        )
        self.ssh.chmod(0o755)

    def __enter__(self) -> "Machines":
        interfaces = [f"{self._prefix}v{number}" for number in (0, 1)]
        for number in (0, 1):
            _ip("netns", "add", self._netns(number))
        _ip("link", "add", interfaces[0], "type", "veth", "peer", "name", interfaces[1])
        for number, interface in enumerate(interfaces):
            netns = self._netns(number)
            _ip("link", "set", interface, "netns", netns)
            _ip("-n", netns, "addr", "add", f"{self.addresses[number]}/24", "dev", interface)
            _ip("-n", netns, "link", "set", "lo", "up")
            _ip("-n", netns, "link", "set", interface, "up")
        return self

    def __exit__(self, *_error: object) -> None:
        for number in (0, 1):
            _ip("netns", "delete", self._netns(number))

    def hostfile(self, directory: Path, *, slots: int = 1) -> Path:
        """Write a hostfile with both machines."""
        file = directory / "hosts"
        file.write_text("".join(f"{name} slots={slots}\n" for name in self.names))
        return file

    def disconnect(self) -> None:
        """Cut the cable: packets are lost without notice."""
        self._set_cable("down")

    def reconnect(self) -> None:
        """Reconnect the cable."""
        self._set_cable("up")

    def kill(self, name: str) -> None:
        """Kill all processes of a machine, as in a power failure."""
        netns = self._netns(self.names.index(name))
        for pid in _ip("netns", "pids", netns).split():
            try:
                psutil.Process(int(pid)).kill()
            except psutil.NoSuchProcess:
                continue

    def _set_cable(self, state: str) -> None:
        _ip("-n", self._netns(1), "link", "set", f"{self._prefix}v1", state)

    def _netns(self, number: int) -> str:
        return f"{self._prefix}-{number}"


def _ip(*args: str) -> str:
    return subprocess.run(["ip", *args], check=True, capture_output=True, text=True).stdout
