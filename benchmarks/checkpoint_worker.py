"""One process of `benchmarks.checkpoint`; see there."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import async_save

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.layout import Fragment
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.files.tensor_io import bytes_of, read_at, write_at

KINDS = ("weights", "exp_avg", "exp_avg_sq")
TENSORS = 100
"""Of each kind."""

CHUNK_BYTES = 16 * 2**20


class State:
    """This process's part of everything that is saved."""

    def __init__(self, parameters: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.numel = parameters // TENSORS // self.world_size
        generator = torch.Generator().manual_seed(self.rank)
        self.tensors = {
            f"{kind}/{index}": torch.rand(self.numel, generator=generator)
            for kind in KINDS
            for index in range(TENSORS)
        }

    def fragments(self) -> Iterator[Fragment]:
        """For our writer."""
        for key, tensor in self.tensors.items():
            yield Fragment(f"model/{key}", self.rank * self.numel, tensor)

    def named(self) -> dict[str, Tensor]:
        """For torch's: what a process names is its own, so that none is looked for twice."""
        return {f"{key}/{self.rank}": tensor for key, tensor in self.tensors.items()}


def seconds_of(action: Callable[[], object]) -> float:
    """Of the slowest process, all of which begin together."""
    dist.barrier()
    began = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def save_ours(writer: CheckpointWriter, state: State, step: int) -> dict[str, float]:
    """Seconds blocked, and until all is done."""
    blocked = 0.0

    def save() -> None:
        nonlocal blocked
        blocked = writer.save(step, state.fragments(), {})
        writer.wait()

    total = seconds_of(save)
    slowest = torch.tensor(blocked, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    assert writer.failure is None, writer.failure
    return {"blocked": slowest.item(), "save": total}


def save_dcp(directory: Path, state: State) -> dict[str, float]:
    """The same of torch's asynchronous save."""
    blocked = 0.0

    def save() -> None:
        nonlocal blocked
        began = time.perf_counter()
        future = async_save(state.named(), checkpoint_id=directory)
        blocked = time.perf_counter() - began
        assert isinstance(future, Future)  # the other kind is that of a stager of one's own
        future.result()

    total = seconds_of(save)
    slowest = torch.tensor(blocked, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {"blocked_dcp": slowest.item(), "save_dcp": total}


def write_raw(path: Path, state: State) -> None:
    """The bytes, one after the other, onto the disk."""
    with path.open("wb", buffering=0) as file:
        position = 0
        for tensor in state.tensors.values():
            write_at(file.fileno(), [bytes_of(tensor)], position)
            position += tensor.nbytes
        os.fsync(file.fileno())


def read_raw(path: Path, memory: Tensor) -> None:
    """The bytes, into memory that is there."""
    view = bytes_of(memory)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for position in range(0, size, CHUNK_BYTES):
            read_at(file.fileno(), [view[: min(CHUNK_BYTES, size - position)]], position)


def load(path: Path, state: State, out: Tensor) -> None:
    """Every byte verified by one of the processes, then this one's part read."""
    checkpoint = Checkpoint.open(path)
    checkpoint.verify(share=state.rank, shares=state.world_size)
    for key in state.tensors:
        checkpoint.read(f"model/{key}", state.rank * state.numel, out)


def forget(paths: Sequence[Path]) -> None:
    """Have the system drop what it keeps of files."""
    dist.barrier()
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def rounds(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """The figures of one round after the other."""
    state = State(args.parameters)
    root, raw = args.directory / "ours", args.directory / f"raw-{state.rank}"
    writer = CheckpointWriter(root, job="benchmark", rank=state.rank, world_size=state.world_size)
    writer.prepare(sum(tensor.nbytes for tensor in state.tensors.values()), pinned=False)
    writer.wait()  # as it is by the time that a run saves for the first time
    out = torch.zeros(state.numel)
    chunk = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
    for number in range(args.rounds):
        figures = save_ours(writer, state, number)
        figures["write"] = seconds_of(lambda: write_raw(raw, state))
        directory = args.directory / f"dcp-{number}"
        figures |= save_dcp(directory, state)
        dist.barrier()
        if state.rank == 0:
            shutil.rmtree(directory)
        path = root / f"step_{number:08d}"
        forget(sorted(path.glob("*.safetensors")))
        figures["load"] = seconds_of(lambda path=path: load(path, state, out))
        forget([raw])
        figures["read"] = seconds_of(lambda: read_raw(raw, chunk))
        yield figures


def main(argv: Sequence[str]) -> None:
    """Run on one process; rank 0 writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = list(rounds(args))
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(found))
    dist.barrier()
    # Not by the interpreter's own end: gloo's threads now and then abort there, with all work done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
