"""Gloo processes on one machine."""

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
    """Return the rank of this process."""
    return current_mesh().world.rank


def world_size() -> int:
    """Return the number of processes."""
    return current_mesh().world.size


def run_ranks(
    body: Callable[..., Any], *args: object, world_size: int = 2, may_die: tuple[int, ...] = ()
) -> list[Any]:
    """Call `body(*args)` on every rank of a gloo group; return the results by rank.

    `body` must be importable by the processes. The tensors that it returns are copied. A rank that
    dies returns None if it is in `may_die`.

    Raises:
        AssertionError: if a rank raised, with its traceback, or died.
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
                _receive_result(rank, receiver, may_die=rank in may_die)
                for rank, (receiver, _) in enumerate(pipes)
            ]
        finally:
            for process in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()


def _receive_result(rank: int, receiver: Connection, *, may_die: bool) -> Any:
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
    # Gloo supports only CPU tensors, so these ranks must not see a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT_SECONDS),
    )
    dist.barrier()  # a rank that ends before another connects makes it fail
    try:
        answer = (body(*args), None)
    except BaseException:  # noqa: BLE001  # the test reports any error
        answer = (None, traceback.format_exc())
    # Plain pickle, since the pipe's shares tensors by handles that are invalid after this process.
    sender.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
