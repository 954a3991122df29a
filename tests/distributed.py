"""Real gloo processes on one machine."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.parallel.mesh import current_mesh

PROCESSES = multiprocessing.get_context("forkserver")
# The server imports this once; every rank is then forked from it in milliseconds.
PROCESSES.set_forkserver_preload(["tests.preloaded"])
_TIMEOUT_SECONDS = 120


def rank() -> int:
    """Of this process in the job."""
    return current_mesh().world.rank


def world_size() -> int:
    """Processes of the job."""
    return current_mesh().world.size


def run_ranks(
    body: Callable[..., Any], *args: object, world_size: int = 2, may_die: tuple[int, ...] = ()
) -> list[Any]:
    """Call `body(*args)` on every rank of a gloo group; what each returned, in rank order.

    `body` is a function of a module, so that the processes can import it; tensors it returns come
    back by value. A rank that `may_die` returns None where it did.

    Raises:
        AssertionError: on a rank it raised, with that rank's traceback, or did not come back.
    """
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{Path(directory) / 'rendezvous'}"
        pipes = [PROCESSES.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            PROCESSES.Process(
                target=_run, args=(body, args, rank, world_size, rendezvous, sender), daemon=True
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()
        try:
            return [
                _result(rank, receiver, may_die=rank in may_die)
                for rank, (receiver, _) in enumerate(pipes)
            ]
        finally:
            for process in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()


def _result(rank: int, receiver: Connection, *, may_die: bool) -> Any:
    assert receiver.poll(_TIMEOUT_SECONDS), f"rank {rank} gave no answer"
    try:
        result, error = pickle.loads(receiver.recv_bytes())  # noqa: S301  # from our own child
    except EOFError:
        if may_die:
            return None
        raise AssertionError(f"rank {rank} died") from None
    assert error is None, f"rank {rank} failed:\n{error}"
    return result


def _run(
    body: Callable[..., Any],
    args: tuple[object, ...],
    rank: int,
    world_size: int,
    rendezvous: str,
    sender: Connection,
) -> None:
    # Gloo takes tensors of the host alone: on a machine with a GPU these ranks see none.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT_SECONDS),
    )
    dist.barrier()  # a rank that ends before another has connected would fail that one
    try:
        answer = (body(*args), None)
    except BaseException:  # noqa: BLE001  # whatever it was, the test shall show it
        answer = (None, traceback.format_exc())
    # Plain pickle, not the pipe's own: that shares tensors by handles which end with this process.
    sender.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
