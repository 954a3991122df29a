"""Rows of real text, from a small model of stories itself.

python -m benchmarks.story_rows --model STORIES260K --output rows --stories 3000

The model writes stories from nothing but its beginning-of-sequence token. The first two sentences
of each are a `prompt`, the next three its `response`, in the format of docs/data.md. A fifth goes
to `test.jsonl`, the rest to `train.jsonl`: `--data-path rows` reads them as two splits.
"""

import argparse
import json
import logging
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from benchmarks.story_rule import sentences_of
from inference.generation import generate
from pipeline.logs import configure_logging
from pipeline.models.chat import decode_response
from pipeline.models.load import load_for_inference

LONGEST = 176
"""Tokens of a story that are sampled."""

OPENING, GOES_ON = 2, 3
"""Sentences of a prompt, and of its response."""

RESPONSE_TOKENS = 96
"""Longest response, its end included."""

HELD_OUT = 0.2
TEMPERATURE = 0.8

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> None:
    """Write the rows, and say how many there are."""
    parser = argparse.ArgumentParser(description="Rows of stories: openings and how they go on.")
    parser.add_argument("--model", required=True, help="directory of a causal LM of short stories")
    parser.add_argument("--output", type=Path, required=True, help="directory of the rows")
    parser.add_argument("--stories", type=int, default=3000, help="to sample")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    configure_logging(is_main=True)
    rows = sample_rows(args.model, count=args.stories, seed=args.seed)
    held_out = round(len(rows) * HELD_OUT)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("test", rows[:held_out]), ("train", rows[held_out:])):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen)
        (args.output / f"{name}.jsonl").write_text(text, encoding="utf-8")
    logger.info("%d stories gave %d rows; %d are held out", args.stories, len(rows), held_out)


def sample_rows(path: str, *, count: int, seed: int) -> list[dict[str, str]]:
    """A row of each sampled story that is long enough, in any order, each prompt once."""
    model, tokenizer = load_for_inference(path, precision="fp32")
    begin, ends = borders(tokenizer)
    stories = generate(
        model,
        [[begin]] * count,
        keys=range(count),
        max_new_tokens=LONGEST,
        temperature=TEMPERATURE,
        stop_ids=ends,
        seed=seed,
        batch_size=128,
    )
    rows: dict[str, dict[str, str]] = {}
    for story in stories:
        row = split(tokenizer, decode_response(tokenizer, story.ids))
        if row is not None:
            rows.setdefault(row["prompt"], row)
    shuffled = list(rows.values())
    random.Random(seed).shuffle(shuffled)
    return shuffled


def borders(tokenizer: PreTrainedTokenizerBase) -> tuple[int, tuple[int, ...]]:
    """The token before a text, and those that end one: llama2.c's models begin the next text."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    known = tuple(token for token in (bos, eos) if isinstance(token, int))
    if not known:
        raise SystemExit("the tokenizer has neither bos_token nor eos_token")
    return known[0], known


def split(tokenizer: PreTrainedTokenizerBase, story: str) -> dict[str, str] | None:
    """The story as prompt and response; None where it is too short, or the response too long."""
    sentences = sentences_of(" ".join(story.split()))[: OPENING + GOES_ON]
    prompt = "".join(sentences[:OPENING]).strip()
    response = "".join(sentences[OPENING:]).strip()
    is_short = len(sentences) < OPENING + GOES_ON
    if is_short or len(tokenizer(response)["input_ids"]) >= RESPONSE_TOKENS:
        return None
    return {"prompt": prompt, "response": response}


if __name__ == "__main__":
    main(sys.argv[1:])
