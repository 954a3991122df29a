"""Show how rows are read, formatted and masked: `python -m pipeline.data.inspect`.

Trained tokens are shown between [[ and ]].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from pipeline.cli.options import parse_command, print_output, run_main
from pipeline.config import EMBEDDED, DataConfig, FrozenModelConfig
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.data.sharing.steps import load_examples
from pipeline.system.errors import counted, require
from pipeline.system.installation import MODULE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SEED = 1234
"""Seed of the run, for the rows of the embedded task."""

ALIASES = {"data_path": "path", "data_split": "split", "data_seed": "seed"}


@dataclass(frozen=True, kw_only=True)
class InspectConfig(DataConfig):
    """The rows to show."""

    tokenizer: str = EMBEDDED
    """Model id or local directory of the tokenizer."""

    step: Literal[1, 2, 3] = 1
    """The step that reads the rows."""

    rows: int = 3
    """Number of training rows to print."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rows >= 0, f"rows must be at least 0, got {self.rows}")


def encode_row(example: Example, chat: ChatFormat, config: InspectConfig) -> dict[str, Encoded]:
    """Encode a row untruncated: chosen (step 1), both responses (step 2) or prompt (step 3)."""
    if config.step == 3:
        return {
            "prompt": Encoded.untrained(chat.encode_prompt(example.prompt, origin=example.origin))
        }
    responses = {"chosen": example.chosen, "rejected": example.rejected}
    return {
        name: chat.encode(example.prompt, response, config.train_on, origin=example.origin)
        for name, response in responses.items()
        if name == "chosen" or config.step == 2
    }


def main(argv: Sequence[str]) -> None:
    """Print some rows, and counts over all training rows of the step."""
    config = parse_command(
        InspectConfig,
        argv,
        usage=f"{MODULE} pipeline.data.inspect [--data-path FILE ...] [--SETTING VALUE ...]",
        about="Print how rows are read, put into a chat format and masked.",
        aliases=ALIASES,
    )
    data = load_examples(config, step=config.step, seed=SEED)

    from pipeline.models.hf.chat import load_chat

    chat = load_chat(FrozenModelConfig(path=config.tokenizer), config)
    encoded = [encode_row(example, chat, config) for example in data.train]

    held_out = min(len(data.eval), config.max_eval_rows)
    trained = counted(len(data.train), "training row")
    print_output(f"step {config.step}: {trained}, {held_out} for evaluation")
    for note in data.notes:
        print_output(f"  {note}")
    stops = ", ".join(
        f"{chat.tokenizer.convert_ids_to_tokens(stop)} ({stop})" for stop in chat.stop_ids
    )
    print_output(f"format {chat.name}; a response ends with {stops}")
    for number, example in enumerate(data.train[: config.rows], start=1):
        print_output(f"\nrow {number}: {example.origin}")
        _print_row(config, example, encoded[number - 1], chat.tokenizer)
    dialogues = [dialogue for row in encoded for dialogue in row.values()]
    num_trained, num_tokens = sum(row.num_targets for row in dialogues), sum(map(len, dialogues))
    num_long = sum(len(dialogue) > config.max_length for dialogue in dialogues)
    print_output(
        f"\nin all rows, {num_trained} of {num_tokens} tokens ({num_trained / num_tokens:.0%}) are"
        f" trained on; longer than {config.max_length} tokens: {num_long} of {len(dialogues)}"
    )


def _print_row(
    config: InspectConfig,
    example: Example,
    encoded: dict[str, Encoded],
    tokenizer: "PreTrainedTokenizerBase",
) -> None:
    """Print a row as it was read, and each of its dialogues with the trained tokens marked."""
    for name in ("prompt", "chosen", "rejected"):
        for message in getattr(example, name):
            text = " ".join((message.content or message.keys).split())
            preview = text if len(text) <= 80 else text[:77] + "..."
            print_output(f"  {name:8} {message.role:9} {preview}")
    for name, full in encoded.items():
        # Step 2 keeps the end, where the score is read.
        limit = config.max_length
        dialogue = full.tail(limit) if config.step == 2 else full.head(limit)
        dropped = f", {len(full) - len(dialogue)} cut off" if len(dialogue) < len(full) else ""
        print_output(
            f"  {name} as {len(dialogue)} tokens, {dialogue.num_targets} trained{dropped}:"
        )
        print_output(mark_trained(dialogue, tokenizer))


def mark_trained(dialogue: Encoded, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the dialogue's text with runs of trained tokens between [[ and ]]."""
    runs = groupby(zip(dialogue.input_ids, dialogue.trained, strict=True), key=lambda pair: pair[1])
    ids: list[int] = []
    text = marked = ""
    for trained, run in runs:
        # Decoding a run alone would drop the leading space of SentencePiece tokens.
        ids += [token for token, _ in run]
        decoded = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        marked += f"[[{decoded[len(text) :]}]]" if trained else decoded[len(text) :]
        text = decoded
    return marked


if __name__ == "__main__":
    run_main(main)
