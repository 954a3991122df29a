"""Benchmark generation against transformers' `generate`, with the same model and prompts.

    python -m benchmarks.generation [--precisions fp32 bf16] [--rounds 5] [--threads 2]
    python -m benchmarks.generation --tiny      # the same cases with very short responses
    python -m benchmarks.generation --model DIR --batches 1 16 --longest 64 --precisions fp32
    python -m benchmarks.generation --model DIR --gguf FILE ...     # with llama-cpp-python
    python -m benchmarks.generation --opt [--tiny]      # on a GPU

A Llama with 15M random parameters responds greedily to prompts of 64 tokens. In the first cases,
all responses have 128 tokens; in the last, responses to 64 prompts have 8 to 128 tokens, as if they
ended with a stop token. Both sides alternate within one run, after one warm-up round each; reported
values are medians over rounds of response tokens per second. The last column counts responses with
identical tokens (others diverge where two tokens are equally likely up to rounding); the one before
it is the fraction of our decoding passes that were replayed. With `--model`, each prompt is 56
tokens of this repository's documentation, and all responses have the same length; with `--gguf`,
four more columns compare with llama.cpp, which reads the model from a GGUF file. With `--opt`,
OPT-1.3B with random weights responds in bf16 to 64 prompts of 256 tokens, with 256 tokens each.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging as transformers_logging

from benchmarks.device import Fallbacks, emit
from benchmarks.llama import VOCABULARY, save_llama
from benchmarks.ppo_gpu import save_models
from inference.engine.replay import PassCounts
from inference.engine.sampling import Sampler
from inference.generation import generate_each
from pipeline.config import FrozenModelConfig
from pipeline.models.hf.load import load_causal_lm

PROMPT = 64
TEXT_PROMPT = 56
BATCHES = (1, 8, 32)


@dataclass(frozen=True)
class RequestSizes:
    """Sizes of the requests to both sides."""

    longest: int = 128
    shortest: int = 8
    batches: Sequence[int] = BATCHES
    num_mixed: int = 64
    """Number of prompts in the case with responses of varied lengths."""


TINY = RequestSizes(longest=8, shortest=3, batches=(1,), num_mixed=3)

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
"""Clocks by name; with one thread, processor time is comparable even on a shared machine."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

HEADER = ("precision", "prompts", "responses", "transformers", "ours", "ratio", "spread")
HEADER += ("replayed", "same")
LLAMA_CPP_HEADER = ("llama.cpp", "ratio", "spread", "same")

Responses = list[list[int]]


class RowLengths(StoppingCriteria):
    """Stops each row at its own length."""

    def __init__(self, lengths: Sequence[int], prompt: int) -> None:
        self.lengths = torch.tensor(lengths) + prompt

    def __call__(
        self,
        input_ids: torch.LongTensor,
        scores: tuple[torch.Tensor] | None,  # noqa: ARG002
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> torch.BoolTensor:
        """Return a mask of the rows that have reached their length limit."""
        done = self.lengths.to(input_ids.device) <= input_ids.shape[1]
        return cast("torch.BoolTensor", done)


def generate_with_transformers(
    model: Any,  # noqa: ANN401  # `generate` is untyped
    prompts: Responses,
    lengths: Sequence[int],
) -> Responses:
    """Return greedy responses from one batch, which runs until its longest row ends."""
    ids = torch.tensor(prompts, device=model.device)
    settings = GenerationConfig(
        max_new_tokens=max(lengths), do_sample=False, eos_token_id=None, pad_token_id=2
    )
    criteria = StoppingCriteriaList(
        [RowLengths(lengths, ids.shape[1])] if len(set(lengths)) > 1 else []
    )
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=settings,
        stopping_criteria=criteria,
    )
    rows = output[:, ids.shape[1] :].tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def generate_with_engine(
    model: PreTrainedModel,
    prompts: Responses,
    lengths: Sequence[int],
    passes: PassCounts,
    *,
    slots: int,
) -> Responses:
    """Return greedy responses from the engine, which frees a slot when its response ends."""
    finished = generate_each(
        model,
        prompts,
        Sampler(temperature=0.0, seed=0),
        max_new_tokens=max(lengths),
        batch_size=slots,
        stop_when=lambda index, ids: len(ids) == lengths[index],
        passes=passes,
    )
    responses = {result.index: result.response.ids for result in finished}
    return [responses[row] for row in range(len(prompts))]


def compare(
    sides: Sequence[Callable[[], Responses]], *, rounds: int, clock: Callable[[], float]
) -> tuple[list[list[float]], list[Responses]]:
    """Return the seconds of each side's rounds and the responses of each side."""
    responses = [side() for side in sides]
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, times in zip(sides, seconds, strict=True):
            start = clock()
            side()
            times.append(clock() - start)
    return seconds, responses


def main(argv: Sequence[str]) -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--tiny", action="store_true", help="generate a few short responses")
    parser.add_argument("--model", type=Path, help="Hugging Face directory of the model to use")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp, with --model")
    parser.add_argument("--batches", nargs="+", type=int, help="batch sizes, with --model")
    parser.add_argument(
        "--longest", type=int, default=64, help="maximum tokens per response, with --model"
    )
    parser.add_argument("--prompt", type=int, default=TEXT_PROMPT, help="tokens each, with --model")
    parser.add_argument("--opt", action="store_true", help="use OPT-1.3B, as on a GPU")
    args = parser.parse_args(argv)
    fallbacks = Fallbacks()
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    print(
        f"threads: {args.threads}, {device.type}, {args.clock} time; load before: {os.getloadavg()}"
    )
    header = HEADER if args.gguf is None else HEADER + LLAMA_CPP_HEADER
    print(f"| {' | '.join(header)} |", "|---" * len(header) + "|", sep="\n")
    with tempfile.TemporaryDirectory() as directory:
        if args.opt:
            save_models(Path(directory), tiny=args.tiny)
            args.model, args.precisions, args.rounds = Path(directory) / "actor", ["bf16"], 1
            sizes = ([2], 8, 16) if args.tiny else ([64], 256, 256)
            args.batches, args.longest, args.prompt = sizes
        elif args.model is None:
            save_llama(directory)
        for row in measure_cases(args.model or Path(directory), device, args):
            cells = format_line(row)
            print(f"| {' | '.join(cells)} |", flush=True)
            if args.opt:
                emit("generation", **dict(zip(HEADER, cells, strict=True)))
    if args.opt:
        fallbacks.report()
    print(f"load after: {os.getloadavg()}")


def measure_cases(
    directory: Path, device: torch.device, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure every case in every precision."""
    request_sizes = TINY if args.tiny else RequestSizes()
    if args.model is not None:
        request_sizes = RequestSizes(
            longest=args.longest, batches=args.batches or BATCHES, num_mixed=0
        )
    generator = torch.Generator().manual_seed(0)
    for precision in args.precisions:
        peer: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[precision])
        peer.to(device)
        config = FrozenModelConfig(path=str(directory), precision=precision)
        ours = load_causal_lm(config, device=device)
        for count in filter(None, (*request_sizes.batches, request_sizes.num_mixed)):
            ascending = torch.linspace(request_sizes.shortest, request_sizes.longest, count).long()
            mixed = ascending[torch.randperm(count, generator=generator)].tolist()
            lengths = mixed if count == request_sizes.num_mixed else [request_sizes.longest] * count
            prompts = (
                torch.randint(3, VOCABULARY, (count, PROMPT), generator=generator).tolist()
                if args.model is None
                else text_prompts(args.model, count, args.prompt)
            )
            passes = PassCounts()
            slots = request_sizes.num_mixed or count
            sides = [
                partial(generate_with_engine, ours, prompts, lengths, passes, slots=slots),
                partial(generate_with_transformers, peer, prompts, lengths),
            ]
            if args.gguf is not None:
                sides.append(llama_cpp_side(args, prompts))
            seconds, (actual, *expected) = compare(
                sides, rounds=args.rounds, clock=CLOCKS[args.clock]
            )
            yield {
                "precision": precision,
                "lengths": lengths,
                "seconds": seconds,
                "replayed": passes.replayed / (passes.replayed + passes.eager),
                "same": [sum(a == b for a, b in zip(actual, e, strict=True)) for e in expected],
            }


def text_prompts(directory: Path, count: int, length: int) -> Responses:
    """Return the first `count` passages of the documentation, of `length` tokens each."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    ids = AutoTokenizer.from_pretrained(directory)("".join(page.read_text() for page in pages))
    passages = torch.tensor(ids["input_ids"]).split(length)
    return [passage.tolist() for passage in passages[:count]]


def llama_cpp_side(args: argparse.Namespace, prompts: Responses) -> Callable[[], Responses]:
    """Load the GGUF file, and return the function that generates with it."""
    from benchmarks.llama_cpp import LlamaCpp

    context = args.prompt + args.longest
    peer = LlamaCpp(args.gguf, num_rows=len(prompts), context=context, threads=args.threads)
    return partial(peer.generate, prompts, args.longest)


def format_line(row: Mapping[str, Any]) -> list[str]:
    """Return the table cells of a case."""
    lengths, (ours, *peers) = row["lengths"], row["seconds"]
    our_speed, *speeds = (
        f"{sum(lengths) / statistics.median(side):,.0f} tokens/s" for side in (ours, *peers)
    )
    ratios = [[a / b for a, b in zip(peer, ours, strict=True)] for peer in peers]
    medians = [f"{statistics.median(values):.2f}" for values in ratios]
    spreads = [f"{min(values):.2f} to {max(values):.2f}" for values in ratios]
    same = [f"{count} of {len(lengths)}" for count in row["same"]]
    replayed = f"{100 * row['replayed']:.0f}%"
    cells = [row["precision"], str(len(lengths)), f"{min(lengths)} to {max(lengths)}"]
    cells += [speeds[0], our_speed, medians[0], spreads[0], replayed, same[0]]
    return [*cells, *speeds[1:], *medians[1:], *spreads[1:], *same[1:]]


if __name__ == "__main__":
    main(sys.argv[1:])
