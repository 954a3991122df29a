"""What one machine of a job reports about itself before it starts.

`python -m pipeline.launch.probe` prints one line of JSON. On the first machine it then listens at
the port where processes will meet, until its standard input ends; the others try to reach it.
"""

import argparse
import hashlib
import json
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import psutil

from pipeline.installation import ROOT
from pipeline.launch.torchrun import own_address

CODE = (
    *("pipeline", "inference", "rewards", "evaluation"),
    *("step0_pretrain", "step1_sft", "step2_reward", "step3_ppo", "step3_preference"),
)
PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "datasets", "numpy")

MARK = "rlhf machine: "
"""Before the line of JSON, since a login shell may print a greeting first."""

CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver lists it."""

    name: str
    total_mib: int
    used_mib: int


@dataclass(frozen=True)
class Machine:
    """What a machine reports."""

    versions: dict[str, str]
    """Of Python, of the packages, and a hash of this repository's code."""

    time: float
    disk_bytes: int
    """Free bytes of the output directory's disk."""

    memory_bytes: int
    """Available main memory."""

    gpus: list[Gpu]
    shared: str | None
    """Text of the launcher's mark file; None if this machine doesn't see the file."""

    own_address: str | None
    """The machine's address on the route to the first machine."""

    reaches: bool | None
    """Whether it reaches the port of the first machine; None if that was not tried."""

    port: int | None
    """On the first machine: that port if it is free, else another one."""

    @classmethod
    def from_line(cls, line: str) -> "Machine":
        """The machine that printed a line."""
        values = json.loads(line)
        return cls(**{**values, "gpus": [Gpu(**gpu) for gpu in values["gpus"]]})


def gpus() -> list[Gpu]:
    """The GPUs of this machine, whether this process may use them or not."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=name,memory.total,memory.used"
    listing = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [line.rsplit(",", 2) for line in listing.stdout.splitlines() if line.count(",") >= 2]
    return [
        Gpu(name.strip(), int(total), int(used))
        for name, total, used in rows
        if total.strip().isdigit() and used.strip().isdigit()
    ]


def code_hash() -> str:
    """SHA-256 of the code of this repository."""
    digest = hashlib.sha256()
    files = [ROOT / "train.py"]
    for package in CODE:
        files += [each for each in (ROOT / package).rglob("*") if each.suffix in (".py", ".jinja")]
    for file in sorted(files):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def package_version(name: str) -> str:
    """The installed version of a package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def main(argv: Sequence[str]) -> None:
    """Print what this machine is; hold the port until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.launch.probe")
    parser.add_argument("--mark", type=Path, required=True)
    parser.add_argument("--address")
    parser.add_argument("--port", type=int)
    parser.add_argument("--first", action="store_true")
    args = parser.parse_args(argv)
    mark, packages = args.mark, {name: package_version(name) for name in PACKAGES}
    address: str | None = args.address
    with ExitStack() as held:
        machine = Machine(
            versions={"Python": platform.python_version(), **packages, "code": code_hash()},
            time=time.time(),
            disk_bytes=shutil.disk_usage(mark.parent if mark.parent.is_dir() else Path.cwd()).free,
            memory_bytes=psutil.virtual_memory().available,
            gpus=gpus(),
            shared=mark.read_text() if mark.is_file() else None,
            own_address=own_address(address) if address else None,
            reaches=_reaches(address, args.port) if address and not args.first else None,
            port=_listen(args.port, held) if args.first else None,
        )
        sys.stdout.write(f"{MARK}{json.dumps(asdict(machine))}\n")
        sys.stdout.flush()
        if args.first:
            sys.stdin.read()


def _listen(port: int, held: ExitStack) -> int:
    """Listen at the port, or at another one if it is taken; return its number."""
    for wanted in (port, 0):
        server = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", wanted))
        except OSError:
            continue
        server.listen()
        return server.getsockname()[1]
    return port


def _reaches(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
