"""How long a first token and the next ones take: next turns of dialogues, and beside long prompts.

    python -m benchmarks.serving_latency [--rounds 7]

The Llama of 15M parameters with random weights, in fp32 on one thread, behind the server, asked by
a client over raw sockets. Turns: a dialogue of 1,000 tokens goes on with 32 new ones, with and
without the reuse of what its earlier turns stored. Gaps: a stream is read while prompts of 4,000
tokens come, by how many of their tokens are read between two of its own. Figures are medians of
rounds in wall time; the sides alternate.
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
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from benchmarks.llama import VOCABULARY
from benchmarks.serving import save_model

HISTORY, NEW, LONG = 1000, 32, 4000
CHUNKS = (64, 128, 256, 512, 2048)
CONTEXT = 4352
ANSWER = 400


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


async def times(port: int, prompt: list[int], length: int) -> AsyncIterator[float]:
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
    async for line in reader:
        if line.startswith(b"data: {"):
            yield time.perf_counter() - began
    writer.close()


async def first_token(port: int, prompt: list[int]) -> float:
    """Seconds to the first token."""
    (seconds,) = [each async for each in times(port, prompt, 1)]
    return seconds


async def gaps(port: int) -> tuple[list[float], float]:
    """Seconds between the tokens of a stream, and to the first token of a prompt that came."""
    streamed = times(port, tokens(NEW), ANSWER)
    came = [await anext(streamed) for _ in range(20)]
    other = asyncio.create_task(first_token(port, tokens(LONG)))
    came += [each async for each in streamed]
    return [later - before for before, later in pairwise(came[20:])], await other


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
    print("chunk  median gap  longest gap  first token of the long prompt")
    for chunk in CHUNKS:
        with server(directory, "--prefill-chunk", str(chunk), "--prefix-reuse", "off") as port:
            found = [asyncio.run(gaps(port)) for _ in range(rounds)]
        middle = statistics.median(gap for each, _ in found for gap in each)
        longest = statistics.median(max(each) for each, _ in found)
        first = statistics.median(seconds for _, seconds in found)
        print(
            f"{chunk:5}  {1000 * middle:7.1f} ms  {1000 * longest:8.0f} ms  {first:8.2f} s",
            flush=True,
        )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory, context=CONTEXT)
        measure_turns(directory, options.rounds)
        measure_gaps(directory, options.rounds)


if __name__ == "__main__":
    main()
