"""What it gains to decode rows of several adapters together: against a batch for each name.

    python -m benchmarks.adapter_rows [--rounds 5] [--adapters 3] [--rank 8]

The Llama of 15M parameters with random weights in fp32 and LoRA adapters of all its linear layers,
on one thread. Prompts of 64 tokens, evenly of the base and of each adapter, have responses of 128
tokens: in one open batch in which each row has its own adapter, and in an open batch for each name,
one step of each after the other. Processor seconds, medians of alternating rounds, both warm.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.serving import ANSWER, STOP, prompts, save_model
from inference.engine.batch import OpenBatch
from inference.engine.requests import Request
from inference.engine.row_adapters import RowAdapters
from inference.engine.sampling import Sampler
from inference.serve.adapters import with_adapter, with_adapters_by_row
from pipeline.config import FrozenModelConfig, LoraConfig
from pipeline.models.load import load_causal_lm
from pipeline.models.lora import add_lora

ROWS = (4, 8, 16, 32)
CAPACITY = 256


def save_adapter(base: str, directory: Path, rank: int, seed: int) -> Path:
    """An adapter with random weights."""
    config = FrozenModelConfig(path=base)
    model = load_causal_lm(config, device=torch.device("cpu"))
    adapted = add_lora(model, LoraConfig(rank=rank, alpha=rank), task="causal", seed=seed)
    for name, param in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.02)
    adapted.save_pretrained(str(directory))
    return directory


def open_batch(model: PreTrainedModel, adapters: RowAdapters | None = None) -> OpenBatch:
    """A batch with room for all rows."""
    return OpenBatch(model, num_slots=max(ROWS), capacity=CAPACITY, adapters=adapters)


def seconds(batches: Sequence[OpenBatch], num_rows: int, num_names: int) -> float:
    """Processor seconds of that many responses, of each name equally many."""
    began = time.process_time()
    for row, prompt in enumerate(prompts()[:num_rows]):
        name = row % num_names
        batch, adapter = (batches[0], name) if len(batches) == 1 else (batches[name], 0)
        sampler = Sampler(temperature=1.0, seed=row, min_new_tokens=ANSWER, stop_ids=(STOP,))
        batch.submit(Request(tuple(prompt), sampler, 0, ANSWER, adapter=adapter))
    while any(batch.busy for batch in batches):
        for batch in batches:
            if batch.busy:
                batch.step()
    return time.process_time() - began


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--adapters", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory)
        base = load_causal_lm(FrozenModelConfig(path=directory), device=torch.device("cpu"))
        adapted: list[PreTrainedModel] = []
        for seed in range(options.adapters):
            place = save_adapter(directory, Path(directory) / f"a{seed}", options.rank, seed)
            adapted.append(with_adapter(base, place))
        apart = [open_batch(model) for model in (base, *adapted)]
        together = [open_batch(*with_adapters_by_row(base, adapted))]
        print("rows  together  apart  gain")
        for count in ROWS:
            found: list[tuple[float, float]] = []
            for _ in range(options.rounds + 1):
                both = [seconds(side, count, 1 + len(adapted)) for side in (together, apart)]
                found.append((both[0], both[1]))
            one, other = (statistics.median(side) for side in zip(*found[1:], strict=True))
            print(f"{count:4}  {one:6.2f} s  {other:.2f} s  {other / one:4.2f}", flush=True)


if __name__ == "__main__":
    main()
