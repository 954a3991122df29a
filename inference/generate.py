"""Answer a file of prompts: `python -m inference.generate --path DIR --prompts IN --out OUT`.

Reads a JSON object a line, `{"prompt": "..."}` or `{"messages": [...]}`, and writes one a line, in
the same order: the prompt, `answers`, `token_ids`, `logprobs` and why each answer ended (`stop`).
OUT appears when all is done; until then its lines are in a file beside it, and the same command
goes on from there.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from inference.settings import add_options, sampling_of
from pipeline.cli import run_main
from pipeline.errors import require
from pipeline.installation import MODULE


def main(argv: Sequence[str]) -> None:
    """Answer the prompts.

    Raises:
        UserError: a wrong setting, no model at the path, a line that is not a prompt.
    """
    options = parse(argv)
    require(options.samples > 0, f"--samples must be above 0, got {options.samples}")
    require(options.batch_size > 0, f"--batch-size must be above 0, got {options.batch_size}")
    require(
        options.cache_gib is None or options.cache_gib > 0,
        f"--cache-gib must be above 0, got {options.cache_gib}",
    )
    require(all(options.stop), "--stop needs a text that is not empty")
    sampling = sampling_of(options, seed=options.seed)

    from inference.files.prompts import read_prompts
    from inference.files.responses import Responder, write_responses
    from pipeline.logs import configure_logging
    from pipeline.models.load import load_for_inference

    configure_logging(is_main=True)
    prompts = read_prompts(options.prompts)
    model, tokenizer = load_for_inference(options.path)
    responder = Responder(
        model,
        tokenizer,
        sampling,
        raw=options.raw,
        num_samples=options.samples,
        stop_strings=options.stop,
        cache_bytes=None if options.cache_gib is None else int(options.cache_gib * 2**30),
    )
    write_responses(
        responder, prompts, options.out, model_path=options.path, batch_size=options.batch_size
    )
    logging.getLogger(__name__).info("%d prompts answered in %s", len(prompts), options.out)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=f"{MODULE} inference.generate", description="Answer a file of prompts."
    )
    add = parser.add_argument
    add("--path", required=True, help="model directory, such as OUT/step3_ppo/actor, or Hub id")
    add("--prompts", required=True, type=Path, metavar="IN.jsonl")
    add("--out", required=True, type=Path, metavar="OUT.jsonl")
    add_options(parser, max_new_tokens=64, temperature=0.0)
    add("--samples", type=int, default=1, metavar="N", help="answers to each prompt")
    add("--raw", action="store_true", help="prompts are text to continue: no chat template")
    add("--stop", action="append", default=[], metavar="TEXT", help="end answers before TEXT")
    add("--batch-size", "--batch_size", "--slots", type=int, default=32, metavar="N",
        help="answers computed at once; default 32")  # fmt: skip
    memory = "memory for keys and values; default what a GPU has free, or half of the machine's"
    add("--cache-gib", "--cache_gib", type=float, metavar="X", help=memory)
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_main(main)
