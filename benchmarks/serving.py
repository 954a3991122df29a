"""What the server costs beside its engine: processor time of the same responses, both ways.

    python -m benchmarks.serving [--rounds 5]

The Llama of 15M parameters with random weights answers prompts of 64 tokens with 128 tokens each,
in fp32 on one thread: in an open batch of this process, and streamed by a server in a process of
its own to clients over raw sockets. Both are warm, and alternate. A figure is the median over
rounds of processor seconds, of all threads of whoever generates; that, a machine that others use
can still tell.
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

import psutil
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from benchmarks.llama import VOCABULARY, save_llama
from inference.engine.batch import OpenBatch
from inference.engine.requests import Request
from inference.engine.sampling import Sampler
from pipeline.config import FrozenModelConfig
from pipeline.models.load import load_causal_lm

PROMPT, ANSWER = 64, 128
CLIENTS = (1, 8, 32)
STOP = 1


def save_model(directory: str, *, context: int = 512) -> None:
    """The model, with a tokenizer of as many words."""
    save_llama(directory, context=context)
    words = {"<s>": 0, "</s>": STOP, "<pad>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.decoder = decoders.ByteLevel()  # of most models' tokenizers
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        pad_token="<pad>",
    )
    tokenizer.save_pretrained(directory)


def prompts() -> list[list[int]]:
    """One for each client."""
    generator = torch.Generator().manual_seed(1)
    shape = (max(CLIENTS), PROMPT)
    return torch.randint(3, VOCABULARY, shape, generator=generator).tolist()


def answer_here(batch: OpenBatch, count: int) -> float:
    """Processor seconds of that many responses in this process."""
    began = time.process_time()
    for seed, prompt in enumerate(prompts()[:count]):
        sampler = Sampler(temperature=1.0, seed=seed, min_new_tokens=ANSWER, stop_ids=(STOP,))
        batch.submit(Request(tuple(prompt), sampler, 0, ANSWER))
    while batch.busy:
        batch.step()
    return time.process_time() - began


def answer_there(process: psutil.Process, port: int, count: int) -> float:
    """Processor seconds of that many streamed responses in the server's process."""

    async def all_at_once() -> None:
        await asyncio.gather(*(stream(port, row, prompts()[row]) for row in range(count)))

    before = sum(process.cpu_times()[:2])
    asyncio.run(all_at_once())
    return sum(process.cpu_times()[:2]) - before


async def stream(port: int, seed: int, prompt: list[int]) -> None:
    """A client that reads to the end."""
    fields = {"seed": seed, "max_tokens": ANSWER, "min_tokens": ANSWER, "stream": True}
    body = json.dumps({"prompt": prompt, **fields}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    parts = [part async for part in reader]
    writer.close()
    assert any(b"[DONE]" in part for part in parts), parts[:1]


def main() -> None:
    """Print a line for each number of clients."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory)
        config = FrozenModelConfig(path=directory)
        model = load_causal_lm(config, device=torch.device("cpu"))
        batch = OpenBatch(model, num_slots=max(CLIENTS), capacity=256)
        command = f"inference.serve --path {directory} --port 0 --context 256 --log-requests false"
        with subprocess.Popen(
            [sys.executable, "-m", *command.split()], stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            found = re.search(r":(\d+) :", server.stdout.readline())
            assert found is not None
            process, port = psutil.Process(server.pid), int(found[1])
            print("clients  in process  served  share of the engine")
            for count in CLIENTS:
                answer_here(batch, count)
                answer_there(process, port, count)
                rounds = [
                    (answer_here(batch, count), answer_there(process, port, count))
                    for _ in range(options.rounds)
                ]
                here, there = (statistics.median(side) for side in zip(*rounds, strict=True))
                print(f"{count:7}  {here:8.2f} s  {there:4.2f} s  {here / there:8.2f}", flush=True)
            server.terminate()


if __name__ == "__main__":
    main()
