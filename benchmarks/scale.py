"""What a job of thousands of processes costs beside its training: `python -m benchmarks.scale`.

    python -m benchmarks.scale
    python -m benchmarks.scale --ranks 1024 4096 --parts watch healthy --minutes 1000

Runs the code of the control plane itself for pretended processes, all in this one: the watchdog in
simulated time (`scale_watch.py`, a healthy job by `scale_fleet.py`), the rendezvous store over
sockets, the comparison of slow processes, the manifest and headers of a checkpoint of 70B
parameters, and the plan of a step. It prints a table for each part, a row for each number of
processes. Seconds are of this machine; all other figures are counts.
"""

import argparse
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks import scale_watch
from benchmarks.scale_fleet import Fleet
from pipeline.budget.scaling import ScalingConfig, scale
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.header import write_header
from pipeline.engine.checkpoint.layout import MANIFEST, file_name
from pipeline.engine.checkpoint.manifest import (
    Manifest,
    StoredFile,
    attempt_of,
    library_versions,
    now,
)
from pipeline.engine.layout import padded_size
from pipeline.watchdog.heartbeats import Heartbeats, Sighting
from pipeline.watchdog.stragglers import WINDOW, slow_ranks

SLOW = 0.01
"""Share of the store's answers that come late."""

TIMEOUT = 1800
"""Seconds for which a process may keep the others waiting, by default."""

BLOCKS = 80
WIDTH, INNER, KEYS, VOCABULARY = 8192, 28672, 1024, 128256
"""Of a Llama of 70B parameters."""

KINDS = ("weights", "exp_avg", "exp_avg_sq")

Row = dict[str, str]


def watch(size: int, args: argparse.Namespace) -> Row:
    """What a job that stands still asks the store for between two looks, and who is found when."""
    found = scale_watch.look(size)
    times: dict[str, list[float]] = {"hangs": [], "lost": []}
    for kind, seconds in scale_watch.detections(size, args.trials, slow=SLOW):
        times[kind].append(seconds)
    return {
        "seconds between looks": f"{found.seconds:.1f}",
        "requests": f"{found.requests:,}",
        "keys": f"{found.keys:,}",
        "MB": f"{found.num_bytes / 1e6:.2f}",
        "a hanging process, s after its deadline": _range(times["hangs"]),
        "a lost machine, s after a minute": _range(times["lost"]),
    }


def healthy(size: int, args: argparse.Namespace) -> Row:
    """A job in which nobody keeps the others waiting too long, with slow answers of the store."""
    began = time.perf_counter()
    job = Fleet(size, timeout_seconds=TIMEOUT, slow=SLOW, seed=size)
    blamed = scale_watch.healthy(job, size, args.minutes, timeout_seconds=TIMEOUT)
    return {
        "turns to look": f"{len(job.store.turns):,}",
        "minutes": f"{args.minutes:g}",
        "ended by the watchdog": "no" if blamed is None else blamed.what,
        "s": f"{time.perf_counter() - began:.0f}",
    }


def store(size: int, _args: argparse.Namespace) -> Row:
    """The store over sockets: all heartbeats, all looks for a failure, and a look at all."""
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection = held.clone()  # pyright: ignore[reportAttributeAccessIssue]
    ranks = [
        Heartbeats(PrefixStore("watch/job", connection), "job", rank=rank, world_size=size)
        for rank in range(size)
    ]
    sighting = Sighting(
        123_456, 2**31, "all_gather of model.layers.0 (engine), 1048576 bytes", 9, 9
    )
    beats = _seconds(lambda: [rank.appear(sighting) for rank in ranks])
    failures = _seconds(lambda: [rank.failure() for rank in ranks])
    turns = _seconds(lambda: [rank.swap_turn("0", "", "[0,1,[],{}]") for rank in ranks])
    look = _seconds(lambda: ranks[0].sightings(range(size)))
    pace = max(1.0, size / 1000)
    busy = (beats + turns + look) / pace + failures
    return {
        "heartbeats, s": f"{beats:.3f}",
        "looks for a failure, s": f"{failures:.3f}",
        "turns, s": f"{turns:.3f}",
        "a look at all, s": f"{look:.3f}",
        "of a second, by one connection": f"{100 * busy:.0f} %",
    }


def stragglers(size: int, _args: argparse.Namespace) -> Row:
    """The comparison of a window of steps."""
    generator = torch.Generator().manual_seed(0)
    seconds = 1 + 0.05 * torch.rand(size, WINDOW, generator=generator, dtype=torch.float64)
    seconds[size // 2] *= 1.8
    spent = _seconds(lambda: slow_ranks(seconds))
    assert list(slow_ranks(seconds)) == [size // 2]
    return {"numbers": f"{seconds.numel():,}", "s of a process": f"{spent:.4f}"}


def manifest(size: int, _args: argparse.Namespace) -> Row:
    """What saving and loading 70B parameters costs a process beside its own tensors."""
    fragments = list(shard_fragments(size, 1))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        zeros = [0] * len(fragments)
        header = write_header(fragments, zeros)
        nbytes = len(header) + sum(4 * numel for *_, numel in fragments)
        with (directory / file_name(1, size)).open("wb") as file:
            file.write(header)
            file.truncate(nbytes)  # of the tensors nothing is read, and no room is taken
        written = [_manifest(size, nbytes, header)]
        make = _seconds(lambda: written.append(_manifest(size, nbytes, header)))
        raw = written[0].to_bytes()
        write = _seconds(written[0].to_bytes)
        (directory / MANIFEST).write_bytes(raw)
        committed = _seconds(lambda: attempt_of(directory))
        read = _seconds(lambda: Manifest.read(directory))
        load = _seconds(lambda: Checkpoint.open(directory, rank=1))
    return {
        "fragments of a process": f"{len(fragments):,}",
        "manifest, kB": f"{len(raw) / 1e3:.0f}",
        "after a save, ms": f"{1e3 * committed:.2f}",
        "read, ms": f"{1e3 * read:.1f}",
        "read with the own header, ms": f"{1e3 * load:.1f}",
        "made by the first process, ms": f"{1e3 * (make + write):.1f}",
    }


def plan(size: int, _args: argparse.Namespace) -> Row:
    """The memory and volumes of a step of Llama 70B at all four stages."""
    rows: list[int] = []
    config = ScalingConfig(model="meta-llama/Llama-3.1-70B", gpus=(size,))
    seconds = _seconds(lambda: rows.append(len(list(scale(config)))))
    return {"stages": str(rows[0]), "s": f"{seconds:.1f}"}


PARTS: dict[str, Callable[[int, argparse.Namespace], Row]] = {
    "watch": watch,
    "healthy": healthy,
    "store": store,
    "stragglers": stragglers,
    "manifest": manifest,
    "plan": plan,
}


def shard_fragments(size: int, rank: int) -> Iterator[tuple[str, torch.dtype, int]]:
    """Labels, dtypes and numbers of elements of what a process saves, at ZeRO stages 1 to 3."""
    for number in range(BLOCKS):
        prefix = f"model.layers.{number}"
        weights = {
            "self_attn.q_proj": WIDTH * WIDTH,
            "self_attn.k_proj": WIDTH * KEYS,
            "self_attn.v_proj": WIDTH * KEYS,
            "self_attn.o_proj": WIDTH * WIDTH,
            "mlp.gate_proj": WIDTH * INNER,
            "mlp.up_proj": WIDTH * INNER,
            "mlp.down_proj": WIDTH * INNER,
        }
        norms = {"input_layernorm": WIDTH, "post_attention_layernorm": WIDTH}
        for vector in (weights, norms):
            yield from _spans(prefix, vector, size, rank)
    for name, numel in {"model.embed_tokens": WIDTH * VOCABULARY, "model.norm": WIDTH}.items():
        yield from _spans("", {name: numel}, size, rank)
    yield from _spans("", {"lm_head": WIDTH * VOCABULARY}, size, rank)
    for name in ("python", "numpy", "torch", "cuda"):
        yield f"random/{rank}/{name}|0:632", torch.float32, 632


def _spans(
    prefix: str, vector: dict[str, int], size: int, rank: int
) -> Iterator[tuple[str, torch.dtype, int]]:
    share = padded_size(sum(vector.values()), size) // size
    begin = 0
    for name, numel in vector.items():
        start, stop = max(begin, rank * share), min(begin + numel, (rank + 1) * share)
        if start < stop:
            for kind in KINDS:
                label = f"actor/{kind}/{prefix}.{name}.weight|{start - begin}:{stop - begin}"
                yield label, torch.float32, stop - start
        begin += numel


def _manifest(size: int, nbytes: int, header: bytes) -> Manifest:
    files = {file_name(rank, size): StoredFile(nbytes, zlib.crc32(header)) for rank in range(size)}
    names = [
        f"model.layers.{n}.self_attn.{m}_proj.weight" for n in range(BLOCKS) for m in "abcdefghi"
    ]
    engine = {
        "counters": {name: {"step": 1000.0} for name in names},
        "trained": {name: [WIDTH, WIDTH] for name in names},
    }
    return Manifest(
        step=1000,
        attempt="0123456789ab.1",
        created=now(),
        base=None,
        versions=library_versions(),
        files=files,
        state={"engines": {"actor": engine}},
    )


def _seconds(do: Callable[[], object], *, rounds: int = 3) -> float:
    """Of the fastest of a few calls."""
    spent: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        do()
        spent.append(time.perf_counter() - began)
    return min(spent)


def _range(seconds: Sequence[float]) -> str:
    return f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else "-"


@dataclass(frozen=True)
class Table:
    """What one part found, by number of processes."""

    part: str
    rows: dict[int, Row]

    def __str__(self) -> str:
        columns = ["processes", *next(iter(self.rows.values()))]
        lines = [columns, ["---"] * len(columns)]
        lines += [[f"{size:,}", *row.values()] for size, row in self.rows.items()]
        return "\n".join([f"{self.part}:", *(f"| {' | '.join(line)} |" for line in lines), ""])


def main(argv: Sequence[str]) -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 1024, 4096])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=10, help="simulated, of a healthy job")
    parser.add_argument("--trials", type=int, default=8, help="of processes that hang or are lost")
    args = parser.parse_args(argv)
    for part in args.parts:
        rows = {size: PARTS[part](size, args) for size in args.ranks}
        print(Table(part, rows), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
