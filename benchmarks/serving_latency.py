"""How long a first token and the next ones take: next turns of dialogues, and beside long prompts.

    python -m benchmarks.serving_latency [--rounds 7]

The Llama of 15M parameters with random weights, in fp32 on one thread, behind the server, asked by
a client over raw sockets. Turns: a dialogue of 1,000 tokens goes on with 32 new ones, with and
without the reuse of what its earlier turns stored; medians of rounds in wall time, the sides
alternate. Gaps: the tokens of a response, alone and while a prompt of 4,000 tokens is read, by
`--prefill-gap`; medians of rounds in processor time, in an open batch of this process.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch

from benchmarks.llama import VOCABULARY
from benchmarks.serving import save_model
from inference.engine.batch import OpenBatch
from inference.engine.requests import Request, Ticket, Token
from inference.engine.sampling import Sampler
from inference.serve.lanes import CHUNK
from pipeline.config import FrozenModelConfig
from pipeline.models.load import load_causal_lm

HISTORY, NEW, LONG = 1000, 32, 4000
GAPS = (2.0, 3.0, 5.0, 10.0, None)
CONTEXT = 6144
ALONE = 100
"""Tokens of a response before the long prompt comes; the last half of them counts."""
ANSWER = 1800


@contextmanager
def server(directory: str, *settings: str) -> Iterator[int]:
    """The port of a server of the model, warm."""
    command = f"inference.serve --path {directory} --port 0 --slots 4 --context {CONTEXT}"
    words = [sys.executable, "-m", *command.split(), "--log-requests", "false", *settings]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r":(\d+) :", process.stdout.readline())
        assert found is not None
        port = int(found[1])
        for _ in range(3):
            asyncio.run(first_token(port, tokens(40)))
            asyncio.run(first_token(port, tokens(HISTORY)))
        yield port
        process.terminate()


def tokens(count: int) -> list[int]:
    """Random ones."""
    return torch.randint(3, VOCABULARY, (count,)).tolist()


async def times(port: int, prompt: list[int], length: int) -> AsyncGenerator[float, None]:
    """Seconds from the request to each of its tokens."""
    fields = {"max_tokens": length, "min_tokens": length, "stream": True}
    body = json.dumps({"prompt": prompt, **fields}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    try:
        async for line in reader:
            if line.startswith(b"data: {"):
                yield time.perf_counter() - began
    finally:
        writer.close()


async def first_token(port: int, prompt: list[int]) -> float:
    """Seconds to the first token."""
    (seconds,) = [each async for each in times(port, prompt, 1)]
    return seconds


class Gaps(NamedTuple):
    """Processor seconds between the tokens of a stream."""

    alone: float
    """The median before a long prompt came."""
    beside: list[float]
    """All until its first token."""
    first: float
    """To its first token."""


def gaps(batch: OpenBatch) -> Gaps:
    """What a long prompt does to a stream."""
    stream, long = (
        Request(tuple(tokens(count)), Sampler(temperature=1.0, seed=count), 0, length)
        for count, length in ((NEW, ANSWER), (LONG, 1))
    )
    running = batch.submit(stream)
    alone = [moment for moment, _ in zip(moments(batch, running), range(ALONE), strict=False)]
    coming = batch.submit(long)
    beside = alone[-1:]
    for moment in moments(batch, running):
        beside.append(moment)
        if coming.response.ids:
            break
    batch.cancel(running)
    while batch.busy:
        batch.step()
    median = statistics.median(differences(alone[ALONE // 2 :]))
    return Gaps(median, differences(beside), beside[-1] - beside[0])


def moments(batch: OpenBatch, ticket: Ticket) -> Iterator[float]:
    """When a response's tokens come, in processor time."""
    while not ticket.ended:
        for event in batch.step():
            if isinstance(event, Token) and event.ticket is ticket:
                yield time.process_time()


def differences(times: Sequence[float]) -> list[float]:
    """Between neighbours."""
    return [later - before for before, later in pairwise(times)]


def measure_turns(directory: str, rounds: int) -> None:
    """Print what a next turn gains."""
    with server(directory) as reuses, server(directory, "--prefix-reuse", "off") as reads:
        found: dict[int, list[float]] = {reuses: [], reads: []}
        for _ in range(rounds):
            history, new = tokens(HISTORY), tokens(NEW)
            for port, seconds in found.items():
                asyncio.run(first_token(port, history))
                seconds.append(asyncio.run(first_token(port, [*history, *new])))
    with_reuse, without = (1000 * statistics.median(found[port]) for port in (reuses, reads))
    print(f"next turn: {with_reuse:.0f} ms with reuse, {without:.0f} ms without", flush=True)


def measure_gaps(directory: str, rounds: int) -> None:
    """Print how a long prompt holds up a stream."""
    model = load_causal_lm(FrozenModelConfig(path=directory), device=torch.device("cpu"))
    print("prefill gap  alone     median beside  99 % within    longest  first token of the prompt")
    for gap in GAPS:
        batch = OpenBatch(
            model,
            num_slots=2,
            capacity=CONTEXT,
            chunk=CHUNK["cpu"],
            gap=gap,
            clock=time.process_time,
        )
        # The first round warms.
        found = [gaps(batch) for _ in range(rounds + 1)][1:]
        alone = statistics.median(each.alone for each in found)
        ranked = [sorted(each.beside) for each in found]
        middle, most, longest = (
            statistics.median(each[int(share * (len(each) - 1))] for each in ranked)
            for share in (0.5, 0.99, 1.0)
        )
        first = statistics.median(each.first for each in found)
        print(
            f"{gap or 'null':11}  {1000 * alone:5.1f} ms"
            f"  {1000 * middle:6.1f} ms {middle / alone:4.1f}"
            f"  {1000 * most:6.1f} ms {most / alone:4.1f}  {1000 * longest:5.0f} ms"
            f"  {first:6.2f} s",
            flush=True,
        )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory, context=CONTEXT)
        measure_turns(directory, options.rounds)
        measure_gaps(directory, options.rounds)


if __name__ == "__main__":
    main()
