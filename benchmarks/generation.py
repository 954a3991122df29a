"""Generation against `generate` of transformers: same model, prompts, tokens, precision.

    python -m benchmarks.generation --model DIR [--batches 1 8 32] [--precisions fp32 bf16]
    python -m benchmarks.generation --opt [--tiny]      # on a GPU; tiny: on any device

A model of a Hugging Face directory continues passages of this repository's documentation greedily.
The two sides alternate within one run, after one warm-up round each; a figure is the median over
rounds of response tokens per second. The last column counts responses with identical tokens (others
diverge where two tokens are equally likely up to rounding), the one before it is the share of our
decoding passes replayed from graphs or traces. With `--opt` OPT-1.3B with random weights answers 64
prompts of 256 tokens with 256, in bf16.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from benchmarks.device import Fallbacks, emit
from benchmarks.ppo_gpu import save_models
from inference.engine.replay import PassCounts
from inference.engine.sampling import Sampler
from inference.generation import generate_each
from pipeline.config import FrozenModelConfig
from pipeline.models.hf.load import load_causal_lm

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
"""The clock: processor time, with one thread, is meaningful even on a shared machine."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

HEAD = ("precision", "prompts", "responses", "transformers", "ours", "ratio", "spread")
HEAD += ("replayed", "same")

Responses = list[list[int]]


def answer_with_transformers(
    model: Any,  # noqa: ANN401  # `generate` is untyped
    prompts: Responses,
    longest: int,
) -> Responses:
    """Greedy responses of one batch."""
    ids = torch.tensor(prompts, device=model.device)
    settings = GenerationConfig(
        max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return output[:, ids.shape[1] :].tolist()


def answer_with_ours(
    model: PreTrainedModel,
    prompts: Responses,
    longest: int,
    passes: PassCounts,
) -> Responses:
    """Greedy responses of the engine."""
    finished = generate_each(
        model,
        prompts,
        Sampler(temperature=0.0, seed=0),
        max_new_tokens=longest,
        batch_size=len(prompts),
        stop_when=lambda _, ids: len(ids) == longest,
        passes=passes,
    )
    responses = {each.index: each.response.ids for each in finished}
    return [responses[row] for row in range(len(prompts))]


def compare(
    sides: Sequence[Callable[[], Responses]], *, rounds: int, clock: Callable[[], float]
) -> tuple[list[list[float]], list[Responses]]:
    """Seconds per round for each side, and the responses of each."""
    responses = [side() for side in sides]
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, times in zip(sides, seconds, strict=True):
            started = clock()
            side()
            times.append(clock() - started)
    return seconds, responses


def main(argv: Sequence[str]) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="a Hugging Face directory")
    which.add_argument("--opt", action="store_true", help="OPT-1.3B, as on a GPU")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], help="batch sizes")
    parser.add_argument("--longest", type=int, default=64, help="tokens of a response")
    parser.add_argument("--prompt", type=int, default=56, help="tokens of a prompt")
    parser.add_argument("--tiny", action="store_true", help="a tiny OPT and short responses")
    args = parser.parse_args(argv)
    fallbacks = Fallbacks()
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    print(
        f"{args.threads} threads, {device.type}, {args.clock} time; load before: {os.getloadavg()}"
    )
    print(f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", sep="\n")
    with tempfile.TemporaryDirectory() as directory:
        if args.opt:
            save_models(Path(directory), tiny=args.tiny)
            args.model, args.precisions, args.rounds = Path(directory) / "actor", ["bf16"], 1
            sizes = ([2], 8, 16) if args.tiny else ([64], 256, 256)
            args.batches, args.longest, args.prompt = sizes
        for row in measured(args.model, device, args):
            cells = format_line(row)
            print(f"| {' | '.join(cells)} |", flush=True)
            if args.opt:
                emit("generation", **dict(zip(HEAD, cells, strict=True)))
    if args.opt:
        fallbacks.report()
    print(f"load after: {os.getloadavg()}")


def measured(
    directory: Path, device: torch.device, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure every case in every precision."""
    for precision in args.precisions:
        theirs: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[precision])
        theirs.to(device)
        config = FrozenModelConfig(path=str(directory), precision=precision)
        ours = load_causal_lm(config, device=device)
        for count in args.batches:
            prompts = text_prompts(directory, count, args.prompt)
            passes = PassCounts()
            sides = [
                partial(answer_with_transformers, theirs, prompts, args.longest),
                partial(answer_with_ours, ours, prompts, args.longest, passes),
            ]
            (slow, fast), (expected, got) = compare(
                sides, rounds=args.rounds, clock=CLOCKS[args.clock]
            )
            yield {
                "precision": precision,
                "prompts": count,
                "longest": args.longest,
                "transformers": slow,
                "ours": fast,
                "replayed": passes.share_replayed,
                "same": sum(a == b for a, b in zip(expected, got, strict=True)),
            }


def text_prompts(directory: Path, count: int, length: int) -> Responses:
    """Consecutive passages of the documentation, of `length` tokens each."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    ids = AutoTokenizer.from_pretrained(directory)("".join(page.read_text() for page in pages))
    passages = torch.tensor(ids["input_ids"]).split(length)
    return [passage.tolist() for passage in passages[:count]]


def format_line(row: Mapping[str, Any]) -> list[str]:
    """The cells of a case."""
    slow, fast, count, longest = (row[k] for k in ("transformers", "ours", "prompts", "longest"))
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return [
        row["precision"],
        str(count),
        str(longest),
        *(f"{count * longest / statistics.median(side):,.0f} tokens/s" for side in (slow, fast)),
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        f"{100 * row['replayed']:.0f} %",
        f"{row['same']} of {count}",
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
