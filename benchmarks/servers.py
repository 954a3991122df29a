"""Tokens a second of our server, of `transformers serve` and of llama.cpp's, side by side.

    python -m benchmarks.servers --transformers python --llama-server build/bin/llama-server

The Llama of 15M parameters with random weights, in fp32 or bf16, on one thread. So many clients at
once send a prompt of 64 tokens as text and read a greedy response of 128 tokens as a stream, over
raw sockets. Prompts are new in each round, so nothing is remembered; a server that takes requests
in turns is measured as it is. The servers alternate, each warm; the one that is not measured
sleeps. Figures are medians of rounds: tokens in a second of wall time, and in a second of processor
time of the server, which a machine that others use can still tell.

`--transformers` is a Python that has `transformers[serving]`, `--llama-server` the program of
llama.cpp (github.com/ggml-org/llama.cpp, built with -DGGML_NATIVE=ON); whoever isn't given is left
out.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import torch

from benchmarks.llama import save_llama
from benchmarks.words import save_words, some_words

PROMPT, RESPONSE = 64, 128
CONTEXT = 256
CLIENTS = (1, 8, 32)
MODEL_NAME = "model"
TRANSFORMERS = "from transformers.cli.transformers import main; main()"


@dataclass
class Side:
    """A server that runs."""

    name: str
    port: int
    process: psutil.Process
    fields: dict[str, Any] = field(default_factory=dict)
    """Of its requests, besides those that all have."""

    @property
    def seconds(self) -> float:
        """Processor seconds of all its threads and children until now."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(sum(each.cpu_times()[:2]) for each in family)

    def send(self, number: signal.Signals) -> None:
        """Stop or go on."""
        for each in [self.process, *self.process.children(recursive=True)]:
            each.send_signal(number)


class Speed(NamedTuple):
    """Tokens in a second."""

    wall: float
    processor: float


@contextmanager
def running(name: str, command: Sequence[str], port: int, **fields: Any) -> Iterator[Side]:  # noqa: ANN401
    """A server on one thread, from its first healthy response to the end of the block."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RLHF_THREADS"), "1")
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, env=os.environ | threads | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log
        ) as process,
    ):
        try:
            if not _is_healthy(process, port):
                log.seek(0)
                raise SystemExit(f"{name} did not start:\n{log.read().decode()[-2000:]}")
            yield Side(name, port, psutil.Process(process.pid), fields)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_healthy(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + 180
    while time.monotonic() < end and process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
                if response.status == 200:
                    return True
        except (URLError, OSError):
            time.sleep(0.2)
    return False


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def servers(options: argparse.Namespace, directory: Path) -> Iterator[tuple[str, list[str], dict]]:
    """Names, commands without the port, and fields of requests."""
    model, slots = str(directory / MODEL_NAME), str(max(CLIENTS))
    ours = f"--precision {options.precision} --slots {slots} --context {CONTEXT}"
    yield (
        "ours",
        [
            *(sys.executable, "-m", "inference.serve", "--path", f"{MODEL_NAME}={model}"),
            *f"{ours} --log-requests false --port".split(),
        ],
        {"model": MODEL_NAME},
    )
    if options.transformers:
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[options.precision]
        yield (
            "transformers",
            [
                *(options.transformers, "-c", TRANSFORMERS, "serve", model),
                *f"--continuous-batching --device cpu --dtype {dtype}".split(),
                *("--cb-max-memory-percent", "0.1", "--port"),
            ],
            {"model": model},
        )
    if options.llama_server:
        number_format = {"fp32": "f32", "bf16": "bf16"}[options.precision]
        out = directory / "gguf"
        export = f"pipeline.export --path {model} --to gguf --number-format {number_format}"
        subprocess.run(
            [sys.executable, "-m", *export.split(), "--out", str(out)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        file = str(out / f"model-{number_format}.gguf")
        context = max(CLIENTS) * CONTEXT
        yield (
            "llama.cpp",
            [
                *(options.llama_server, "-m", file),
                *f"-c {context} -np {slots} -t 1 -tb 1 --no-webui --port".split(),
            ],
            {"cache_prompt": False},
        )


async def stream(side: Side, prompt: str) -> str:
    """The text of a response, which a client reads to its end."""
    fields = {"prompt": prompt, "max_tokens": RESPONSE, "temperature": 0, "stream": True}
    body = json.dumps({**fields, "stream_options": {"include_usage": True}, **side.fields}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", side.port)
    writer.write(head.encode() + body)
    parts: list[str] = []
    count = 0
    async for line in reader:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            if "choices" not in event:
                raise SystemExit(f"{side.name}: {event}")
            parts += [choice["text"] or "" for choice in event["choices"]]
            count = (event.get("usage") or {}).get("completion_tokens", count)
    writer.close()
    if count != RESPONSE:
        raise SystemExit(f"{side.name}: {count} tokens came of {RESPONSE}")
    return "".join(parts)


def all_at_once(side: Side, prompts: Sequence[str]) -> tuple[list[str], Speed]:
    """The responses to prompts of that many clients, and how fast they came."""

    async def gather() -> list[str]:
        return await asyncio.gather(*(stream(side, prompt) for prompt in prompts))

    side.send(signal.SIGCONT)
    before, began = side.seconds, time.perf_counter()
    texts = asyncio.run(gather())
    wall, processor = time.perf_counter() - began, side.seconds - before
    side.send(signal.SIGSTOP)
    tokens = RESPONSE * len(texts)
    return texts, Speed(tokens / wall, tokens / processor)


def measure(sides: Sequence[Side], rounds: int) -> None:
    """Print a line for each number of clients and server."""
    for side in sides:
        side.send(signal.SIGSTOP)
    print("clients  server         tokens/s  tokens/processor second  ours to it  same responses")
    for count in CLIENTS:
        found: dict[str, list[Speed]] = {side.name: [] for side in sides}
        same: dict[str, int] = dict.fromkeys(found, 0)
        for number in range(rounds + 1):
            prompts = [some_words(PROMPT) for _ in range(count)]
            texts: dict[str, list[str]] = {}
            for side in sides:
                texts[side.name], speed = all_at_once(side, prompts)
                if number:  # the first round warms
                    found[side.name].append(speed)
                    pairs = zip(texts[side.name], texts["ours"], strict=True)
                    same[side.name] += sum(one == other for one, other in pairs)
        ours = Speed(*map(statistics.median, zip(*found["ours"], strict=True)))
        for name, speeds in found.items():
            speed = Speed(*map(statistics.median, zip(*speeds, strict=True)))
            print(
                f"{count:7}  {name:12}  {speed.wall:9.0f}  {speed.processor:23.0f}"
                f"  {ours.wall / speed.wall:4.2f}, {ours.processor / speed.processor:4.2f}"
                f"  {same[name]:6} of {rounds * count}",
                flush=True,
            )


def main() -> None:
    """Start the servers and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--transformers", help="a Python that has transformers[serving]")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        save_llama(directory / MODEL_NAME, context=CONTEXT)
        save_words(directory / MODEL_NAME)
        sides: list[Side] = []
        for label, command, fields in servers(options, directory):
            port = free_port()
            sides.append(stack.enter_context(running(label, [*command, str(port)], port, **fields)))
        try:
            measure(sides, options.rounds)
        finally:
            for side in sides:
                side.send(signal.SIGCONT)


if __name__ == "__main__":
    main()
