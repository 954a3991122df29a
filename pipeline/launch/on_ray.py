"""Run a step on the nodes of a Ray cluster, with torchrun on each.

A placement group reserves the nodes. An actor on each node starts `pipeline.launch.remote`, as ssh
does, and forwards its standard streams and its exit code.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.cli.options import print_notice
from pipeline.launch.commands import REMOTE, node_command, shell_line
from pipeline.launch.layout import Layout
from pipeline.launch.local import forwarded_variables
from pipeline.launch.ray_cluster import NODE_LOST, TIMEOUT_SECONDS, process_resource, ray_connection
from pipeline.launch.remote import EXIT_LOST, RemoteCommand, run_on_all_hosts


def run_on_ray(step: Sequence[str], layout: Layout) -> int:
    """Run a step on the nodes; return its exit code."""
    with ray_connection():
        nodes = _reserve_nodes(layout)
        addresses = ray.get([node.find_address.remote() for node in nodes])
        layout = replace(layout, address=addresses[0][0], port=addresses[0][1])
        remotes = [
            RemoteCommand(
                f"{host.name} ({address})",
                ["sh", "-c", shell_line([*REMOTE, *node_command(step, layout, rank)])],
                forwarded_variables(os.environ),
                start=partial(_Process, nodes[rank]),
                lost_message=NODE_LOST,
            )
            for rank, (host, (address, _)) in enumerate(zip(layout.hosts, addresses, strict=True))
        ]
        return run_on_all_hosts(remotes)


def _reserve_nodes(layout: Layout) -> list[Any]:
    """Wait for free nodes; return an actor on each."""
    device, num_processes = process_resource([ray.cluster_resources()]), len(layout.hosts[0].slots)
    group = placement_group([{device: num_processes}] * len(layout.hosts), strategy="STRICT_SPREAD")
    if not group.wait(TIMEOUT_SECONDS):
        print_notice(
            f"waiting for Ray nodes with {num_processes} or more free {device}s:"
            f" {len(layout.hosts)} needed"
        )
        ray.get(group.ready())
    # By value, since the Python of the cluster may have no package other than Ray.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return [
        ray.remote(_Node)
        .options(
            **{f"num_{device.lower()}s": num_processes},
            max_concurrency=2,  # `read`, and all other calls
            # `remote` stops its command when the actor is gone; Ray would kill `remote` alone.
            runtime_env={"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        )
        .remote()
        for rank in range(len(layout.hosts))
    ]


class _Node:
    """The actor on a node."""

    def find_address(self) -> tuple[str, int]:
        """Return the address of the node, and a port that is free there."""
        with socket.socket() as server:
            server.bind(("", 0))
            return ray.util.get_node_ip_address(), server.getsockname()[1]

    def start(self, command: Sequence[str], options: Mapping[str, Any]) -> None:
        """Start a command with options of `subprocess.Popen`."""
        os.environ.pop("OMP_NUM_THREADS", None)  # set by Ray
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT
        self.process: Any = subprocess.Popen(command, **options)

    def write(self, data: bytes) -> None:
        """Write to the command's standard input."""
        os.write(self.process.stdin.fileno(), data)

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield output with the index of its stream, 0 or 1; finally, yield the exit code."""
        streams = [self.process.stdout, self.process.stderr]
        unfinished = list(streams)
        while unfinished:
            for stream in select.select(unfinished, [], [])[0]:
                if data := os.read(stream.fileno(), 2**16):
                    yield streams.index(stream), data
                else:
                    unfinished.remove(stream)
        yield self.process.wait(), b""


class _Process:
    """A command on a node, with the attributes of `subprocess.Popen` that `remote` uses."""

    def __init__(self, node: ActorHandle, command: Sequence[str], **options: int) -> None:
        self._node = node
        self._code: int | None = None
        self.stdin = SimpleNamespace(write=node.write.remote, flush=int, close=int)
        ray.get(node.start.remote(command, options))
        pipes = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (os.fdopen(source, "rb") for source, _ in pipes)
        thread = Thread(target=self._read, args=[sink for _, sink in pipes], daemon=True)
        thread.start()
        self.wait = thread.join

    def _read(self, *sinks: int) -> None:
        code = EXIT_LOST
        with suppress(RayError):
            for reference in self._node.read.remote():
                number, data = ray.get(reference)
                if data:
                    os.write(sinks[number], data)
                else:
                    code = number
        for sink in sinks:
            os.close(sink)
        self._code = code if self._code is None else self._code

    def poll(self) -> int | None:
        return self._code

    def terminate(self) -> None:
        self._code = -signal.SIGTERM
        ray.kill(self._node)
