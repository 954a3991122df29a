"""torchrun whose exit code is that of the first process that failed.

`python -m pipeline.launch.torchrun` takes torchrun's options. torchrun itself turns every failure
into exit code 1 below a page of its own; here the failed process has already printed what is wrong.
Ctrl-C and a scheduler's signals reach the processes, which get the time they need to save their
state; a second Ctrl-C has them abort. Nodes that can't meet are a sentence. The processes share the
cores of the machine, and find each other by the address that leads to the first one.
"""

import argparse
import logging
import os
import sys
from contextlib import suppress

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import determine_local_world_size, parse_args, run

from pipeline.cli import EXIT_INTERRUPTED, EXIT_USER_ERROR, complain
from pipeline.launch.interface import interface_of, own_address
from pipeline.launch.local import share_of_cores
from pipeline.signals import EXIT_REQUEUE, STOP_SIGNALS

GRACE_SECONDS = 600
"""Until processes that were asked to stop are killed; a scheduler's own patience ends sooner."""


def main(argv: list[str]) -> int:
    """Run the processes; return the exit code."""
    logging.disable(logging.ERROR)  # of this process, which only starts and watches the others
    options = parse_args(argv)
    least, _, most = options.nnodes.partition(":")
    if most not in ("", least):
        # The store that it would share is announced in the first meeting of a node only, so that
        # one that comes back never learns of it (torch 2.13).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        determine_local_world_size(options.nproc_per_node)
    except ValueError:
        complain(
            f"error: --nproc-per-node {options.nproc_per_node} names no devices of this machine;"
            " give the number of processes (NUM_PROCESSES of the scripts)"
        )
        return EXIT_USER_ERROR
    if options.nproc_per_node.isdigit():
        threads = share_of_cores(int(options.nproc_per_node))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    _face_the_first_node(options)
    try:
        run(_patient(options))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stopped:
        _leave_nothing_behind()
        return EXIT_REQUEUE if stopped.sigval in STOP_SIGNALS else EXIT_INTERRUPTED
    except KeyboardInterrupt:
        _leave_nothing_behind()
        return EXIT_INTERRUPTED
    except (RendezvousError, DistError) as error:
        complain(f"error: the nodes could not meet{_place(options)}: {_reason(error)}")
        return EXIT_USER_ERROR
    return 0


def _leave_nothing_behind() -> None:
    """End processes that outlive torchrun, which waits no more when a second signal stops it."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _face_the_first_node(options: argparse.Namespace) -> None:
    """Have this machine known by its address on the way to the first one.

    Else gloo takes what the machine's name stands for, which often is 127.0.0.1.
    """
    first = options.rdzv_endpoint or ("" if options.standalone else options.master_addr)
    address = own_address(first.rpartition(":")[0] or first) if first else None
    if address is None:
        return
    if options.local_addr is None:
        options.local_addr = address
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _place(options: argparse.Namespace) -> str:
    if options.standalone:
        return ""
    if options.rdzv_endpoint:
        return f" at --rdzv-endpoint {options.rdzv_endpoint}"
    return f" at --master-addr {options.master_addr} --master-port {options.master_port}"


def _reason(error: Exception) -> str:
    """What was wrong, and the mend."""
    message = str(error).partition("\n")[0].rstrip(". ")
    if "EADDRINUSE" in message or "address already in use" in message:
        return "that port is taken by another program; choose another"
    return (
        f"{message}; every node needs the same address, of the first one, a port that is free there"
        " and reachable, and a --node-rank of its own"
    )


def _patient(options: argparse.Namespace) -> argparse.Namespace:
    """Have torchrun pass on SIGUSR1 too, and wait while the processes save."""
    if hasattr(options, "signals_to_handle"):
        options.signals_to_handle += ",SIGUSR1"
    if getattr(options, "shutdown_timeout", 0) is None:
        options.shutdown_timeout = GRACE_SECONDS
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
