"""torchrun with the exit code of the first process that failed.

`python -m pipeline.launch.torchrun` takes torchrun's options. torchrun itself turns every failure
into exit code 1 with a long traceback; here only the failed process prints its error. Ctrl-C and a
scheduler's signals are forwarded to the processes, which get the time they need to save their
state; a second Ctrl-C aborts them. The processes share the cores of the machine, and register under
the address with which they reach the first machine.
"""

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

import psutil

from pipeline.cli.options import print_error
from pipeline.system.errors import EXIT_USER_ERROR
from pipeline.system.signals import EXIT_INTERRUPTED, EXIT_REQUEUE, STOP_SIGNALS
from pipeline.system.threads import cores_per_process

GRACE_SECONDS = 600
"""Seconds until processes that received a stop signal are killed; schedulers wait less."""

ANY_PORT = 9
"""Port for route look-ups: connecting a datagram socket sends nothing."""

OTHER_NETWORK = "192.0.2.1"
"""An address that no machine has (RFC 5737), to find the address that other machines see."""


def main(argv: list[str]) -> int:
    """Run the processes; return the exit code."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import determine_local_world_size, parse_args, run

    logging.disable(logging.ERROR)  # this process only starts and watches the others
    options = parse_args(argv)
    min_nodes, _, max_nodes = options.nnodes.partition(":")
    if max_nodes not in ("", min_nodes):
        # torchrun announces a shared store only in a node's first rendezvous, so a node that
        # rejoins never learns of it (torch 2.13).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        processes = determine_local_world_size(options.nproc_per_node)
    except ValueError:
        print_error(
            f"error: --nproc-per-node {options.nproc_per_node}: this machine has no such device;"
            " pass the number of processes (NUM_PROCESSES in the scripts)"
        )
        return EXIT_USER_ERROR
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_per_process(processes)))  # pyrefly: ignore[bad-argument-type]
    use_route_to_first_node(options)
    if hasattr(options, "signals_to_handle"):
        options.signals_to_handle += ",SIGUSR1"
    if getattr(options, "shutdown_timeout", 0) is None:
        options.shutdown_timeout = GRACE_SECONDS
    try:
        run(options)
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        return select_exit_code([failure.exitcode for failure in failures])
    except SignalException as stopped:
        _kill_children()
        return EXIT_REQUEUE if stopped.sigval in STOP_SIGNALS else EXIT_INTERRUPTED
    except KeyboardInterrupt:
        _kill_children()
        return EXIT_INTERRUPTED
    except (RendezvousError, DistError) as error:
        print_error(f"error: the nodes could not rendezvous {_reason(options, error)}")
        return EXIT_USER_ERROR
    return 0


def select_exit_code(codes: Sequence[int]) -> int:
    """Return the code of the process that failed first, given all codes in chronological order.

    One poll may return the failed process, processes that failed as a result, and processes that
    torchrun has stopped with SIGTERM. A killed process takes precedence, with 128 plus its signal.
    """
    failed = [code for code in codes if code != -signal.SIGTERM] or list(codes)
    code = next((code for code in failed if code < 0), failed[0])
    return code if code > 0 else 128 - code


def _kill_children() -> None:
    """Kill processes that outlive torchrun, which doesn't wait for them after a second signal."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def use_route_to_first_node(options: argparse.Namespace) -> None:
    """Register this machine under its address on the route to the first machine.

    By default gloo resolves the machine's hostname, which often gives 127.0.0.1. On the first
    machine its own name may do so too, as in Debian's /etc/hosts: it then uses its default route.
    """
    host = options.rdzv_endpoint.rpartition(":")[0].strip("[]") or options.rdzv_endpoint
    first = host or ("" if options.standalone else options.master_addr)
    address = own_address(first) if first else None
    if address is None:
        return
    if options.nnodes not in ("1", "1:1") and ip_address(address.partition("%")[0]).is_loopback:
        address = own_address(OTHER_NETWORK) or address
    if options.local_addr is None:
        options.local_addr = address
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address.partition("%")[0] == address for item in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def own_address(other: str) -> str | None:
    """Return this machine's address on the route to another, given by name or address.

    Return None if there is no route or the name can't be resolved.
    """
    try:
        candidates = socket.getaddrinfo(other, ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, socket_address in candidates:
        with socket.socket(family, kind, protocol) as route, suppress(OSError):
            route.connect(socket_address)
            return route.getsockname()[0]
    return None


def _reason(options: argparse.Namespace, error: Exception) -> str:
    location = f"at --master-addr {options.master_addr} --master-port {options.master_port}"
    if options.rdzv_endpoint:
        location = f"at --rdzv-endpoint {options.rdzv_endpoint}"
    if options.standalone:
        location = "on this machine"
    message = str(error).partition("\n")[0].rstrip(". ")
    if "EADDRINUSE" in message or "address already in use" in message:
        return f"{location}: the port is in use by another program; choose another"
    return (
        f"{location}: {message}; every node needs the first node's address, a port that is free and"
        " reachable there, and a different --node-rank"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
