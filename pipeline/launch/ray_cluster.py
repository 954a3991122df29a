"""The Ray cluster that this machine belongs to, or that RAY_ADDRESS names."""

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import ray
from ray.exceptions import RayError

from pipeline.cli.options import print_error
from pipeline.launch.local import CPU_PROCESSES
from pipeline.system.errors import EXIT_FAILED, ConfigError, require

TIMEOUT_SECONDS = 10.0
"""Time limit for connecting, and for finding free nodes before a notice is printed."""

NODE_LOST = "the node was lost; --resume continues on the nodes that remain"


@contextmanager
def ray_connection() -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS or on this machine, or raise ConfigError."""
    address = os.environ.get("RAY_ADDRESS") or "auto"
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit() and not _is_listening(host.rpartition("/")[2], int(port)):
            raise ConnectionError  # noqa: TRY301  # Ray itself retries for many minutes
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        raise ConfigError(
            f"no Ray cluster was found (address {address}); start one with `ray start --head`, or"
            " set RAY_ADDRESS to the address of a running cluster"
        ) from None
    try:
        yield
    except RayError as error:
        print_error(f"{NODE_LOST} ({str(error).splitlines()[0]})")
        raise SystemExit(EXIT_FAILED) from None
    finally:
        ray.shutdown()


def _is_listening(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), TIMEOUT_SECONDS):
        return True
    return False


def count_nodes(nodes: int | None, processes: int | None) -> tuple[int, int]:
    """Return the numbers of nodes and of processes per node, by default those available.

    Nodes without GPUs run at most `CPU_PROCESSES` by default.
    """
    with ray_connection():
        resources = [
            node["Resources"]
            for node in ray.nodes()  # Ray takes half a minute to notice a lost one
            if node["Alive"] and _is_listening(node["NodeManagerAddress"], node["NodeManagerPort"])
        ]
    device = process_resource(resources)
    counts = sorted((int(node.get(device, 0)) for node in resources), reverse=True)
    counts = [count for count in counts if count >= (processes or 1)][:nodes]
    require(bool(counts), f"no node of the Ray cluster has {processes or 1} or more {device}s")
    max_processes = counts[-1] if device == "GPU" else min(counts[-1], CPU_PROCESSES)
    return nodes or len(counts), processes or max_processes


def process_resource(resources: Sequence[Mapping[str, float]]) -> str:
    """Return the resource of one process: a GPU, or a CPU in a cluster without GPUs."""
    return "GPU" if any(node.get("GPU") for node in resources) else "CPU"
