"""How rows are read, put into a chat format and masked: `python -m pipeline.data.inspect`.

Trained tokens are shown in colour, or between [[ and ]] where there is no terminal or NO_COLOR is
set. Then come the checks of `lint`, over all training rows of the step.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from pipeline.cli.options import read_command, run_main
from pipeline.config import EMBEDDED, DataConfig, FrozenModelConfig
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example, Message
from pipeline.data.sharing.steps import StageData, load_examples
from pipeline.system.errors import require
from pipeline.system.installation import MODULE

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase


Level = Literal["ok", "info", "warning"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str

    level: Level
    """ok: nothing found; info: good to know; warning: training suffers from it."""

    count: int
    """Rows, or tokens, that the sentence is about."""

    sentence: str


@dataclass(frozen=True)
class EncodedRow:
    """An example and the dialogues in it that the step reads."""

    example: Example

    dialogues: dict[str, Encoded]
    """By name: chosen and rejected, or prompt."""


def encode_rows(
    examples: Iterable[Example],
    chat: ChatFormat,
    *,
    step: int,
    train_on: Literal["assistant", "all"] = "assistant",
) -> list[EncodedRow]:
    """The dialogues of each example as step 1, 2 or 3 encodes them, before any is cut."""
    rows = []
    for example in examples:
        if step == 3:
            dialogues = {"prompt": Encoded.untrained(chat.encode_prompt(example.prompt))}
        else:
            dialogues = {"chosen": chat.encode(example.prompt, example.chosen, train_on)}
        if step == 2:
            dialogues["rejected"] = chat.encode(example.prompt, example.rejected, train_on)
        rows.append(EncodedRow(example, dialogues))
    return rows


def lint(
    train: Sequence[EncodedRow],
    held_out: Sequence[Example],
    chat: ChatFormat,
    *,
    step: int,
    max_length: int,
) -> list[Finding]:
    """The findings of all checks that concern `step`.

    Args:
        train: the training rows.
        held_out: the rows for evaluation.
        chat: the format the rows are encoded in.
        step: 1, 2 or 3.
        max_length: in tokens; what is longer is cut.
    """
    findings = [
        _pad_is_eos(chat),
        _doubled_bos(train, chat),
        _too_long(train, step=step, max_length=max_length),
        _duplicates(train),
        _held_out_prompts(train, held_out),
        _special_tokens(train, chat),
    ]
    if step != 3:
        findings.append(_empty_responses(train))
    if step == 1:
        findings.append(_trained_share(train, max_length=max_length))
    if step == 2:
        findings.append(_equal_responses(train))
    return findings


def _finding(name: str, count: int, of: int, problem: str, *, things: str = "rows") -> Finding:
    """A warning that `count` of `of` rows have a problem, or that none has."""
    if count:
        return Finding(name, "warning", count, f"{count} of {of} {things} {problem}")
    return Finding(name, "ok", 0, f"none of {of} {things} {problem}")


def _pad_is_eos(chat: ChatFormat) -> Finding:
    tokenizer = chat.tokenizer
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return Finding("pad = eos", "ok", 0, "padding and end of sequence are different tokens")
    return Finding(
        "pad = eos",
        "info",
        1,
        f"the padding token {tokenizer.pad_token!r} is the end-of-sequence token; masks here come"
        " from lengths, but software that masks padding by its id trains no end of sequence",
    )


def _doubled_bos(rows: Sequence[EncodedRow], chat: ChatFormat) -> Finding:
    bos = chat.tokenizer.bos_token_id
    doubled = sum(
        bos is not None and any(ids.input_ids[:2] == [bos, bos] for ids in row.dialogues.values())
        for row in rows
    )
    return _finding(
        "doubled BOS", doubled, len(rows), "begin with two beginning-of-sequence tokens"
    )


def _too_long(rows: Sequence[EncodedRow], *, step: int, max_length: int) -> Finding:
    dialogues = [dialogue for row in rows for dialogue in row.dialogues.values()]
    long = [dialogue for dialogue in dialogues if len(dialogue) > max_length]
    problem = f"are longer than {max_length} tokens"
    if long and step == 1:
        emptied = sum(dialogue.head(max_length).num_targets == 0 for dialogue in long)
        problem += f" and lose their end; {emptied} of them all that is trained"
    elif long:
        problem += " and lose their beginning" if step == 2 else " and are left out"
    return _finding("cut off", len(long), len(dialogues), problem, things="dialogues")


def _duplicates(rows: Sequence[EncodedRow]) -> Finding:
    copies = Counter((row.example.prompt, row.example.chosen, row.example.rejected) for row in rows)
    repeated = sum(copies.values()) - len(copies)
    return _finding("duplicates", repeated, len(rows), "repeat another row")


def _held_out_prompts(rows: Sequence[EncodedRow], held_out: Sequence[Example]) -> Finding:
    """Exact repetitions are taken out when rows are read; here case and spacing don't count."""
    prompts = {_loosely(example) for example in held_out}
    shared = sum(_loosely(row.example) in prompts for row in rows)
    return _finding(
        "train rows in eval",
        shared,
        len(rows),
        "have the prompt of an evaluation row, case and spacing aside",
    )


def _loosely(example: Example) -> tuple[str, ...]:
    messages = example.prompt or example.chosen
    return tuple(" ".join(message.content.split()).casefold() for message in messages)


def _special_tokens(rows: Sequence[EncodedRow], chat: ChatFormat) -> Finding:
    special = {str(token) for token in chat.tokenizer.all_special_tokens} | set(chat.tokens)
    written = sum(
        any(token in message.content for message in _messages(row.example) for token in special)
        for row in rows
    )
    return _finding(
        "special tokens in text", written, len(rows), "have a special token written in their text"
    )


def _messages(example: Example) -> tuple[Message, ...]:
    return (*example.prompt, *example.chosen, *example.rejected)


def _empty_responses(rows: Sequence[EncodedRow]) -> Finding:
    empty = sum(
        any(message.role == "assistant" and not message.content.strip() for message in turns)
        for turns in (_messages(row.example) for row in rows)
    )
    return _finding("empty responses", empty, len(rows), "have an assistant turn without text")


def _equal_responses(rows: Sequence[EncodedRow]) -> Finding:
    equal = sum(row.example.chosen == row.example.rejected for row in rows)
    return _finding("chosen = rejected", equal, len(rows), "have equal responses and teach nothing")


def _trained_share(rows: Sequence[EncodedRow], *, max_length: int) -> Finding:
    kept = [row.dialogues["chosen"].head(max_length) for row in rows]
    trained, tokens = sum(row.num_targets for row in kept), sum(map(len, kept))
    sentence = f"{trained} of {tokens} tokens ({trained / tokens:.0%}) are trained"
    return Finding("trained share", "info" if trained else "warning", trained, sentence)


_STYLES = {"ok": "green", "info": "cyan", "warning": "bold yellow"}


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """What to look at."""

    data_path: tuple[str, ...] = (EMBEDDED,)
    """Local .json, .jsonl, .csv, .tsv (all also .gz) or .parquet files, directories, or Hub names;
    each may end in `@split` and `:weight`. `embedded` is the built-in task."""

    eval_path: tuple[str, ...] = ()
    """Rows for evaluation; empty holds out `eval_fraction` of `data_path`, or its test split."""

    eval_fraction: float = 0.1
    """Share of the prompts held out for evaluation where `eval_path` is empty."""

    data_split: tuple[float, float, float] = (2.0, 4.0, 4.0)
    """Proportions of the prompts that steps 1, 2 and 3 see."""

    data_seed: int = 0
    """Decides which prompts are held out and which step gets each other one."""

    fields: dict[str, str] = field(default_factory=dict)
    """Column names where they differ from the usual: prompt=question chosen=good."""

    tokenizer: str = EMBEDDED
    """Model id or local directory of the tokenizer."""

    format: str = "auto"
    """Chat format: auto, tokenizer, human_assistant, chatml, llama2, llama3, alpaca, vicuna, plain,
    or a path to a Jinja file."""

    template_args: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of the chat template: `{"enable_thinking": false}`."""

    template_date: str = DataConfig.template_date
    """The date, such as 2026-01-31, for chat templates that put today's into the prompt."""

    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens whose prediction is trained: assistant turns only, or the whole dialogue."""

    max_length: int = 512
    """Prompt + response, in tokens; what is longer is cut."""

    step: Literal[1, 2, 3] = 1
    """The step that reads the rows."""

    rows: int = 3
    """Training rows to print."""

    token_ids: bool = False
    """Print the token ids as well."""

    seed: int = 1234
    """Seed of the run: the built-in task draws its rows with it."""

    def __post_init__(self) -> None:
        require(self.rows >= 0, f"rows must not be below 0, got {self.rows}")

    @property
    def data(self) -> DataConfig:
        """The settings as a step has them."""
        return DataConfig(
            path=self.data_path,
            eval_path=self.eval_path,
            eval_fraction=self.eval_fraction,
            split=self.data_split,
            seed=self.data_seed,
            fields=self.fields,
            format=self.format,
            template_args=self.template_args,
            template_date=self.template_date,
            train_on=self.train_on,
            max_length=self.max_length,
        )


def main(argv: Sequence[str]) -> None:
    """Print rows and findings."""
    config = read_command(
        InspectConfig,
        argv,
        usage=f"{MODULE} pipeline.data.inspect [--SETTING VALUE ...]",
        about="Print how rows are read, put into a chat format and masked, and check them.",
    )
    data = load_examples(config.data, step=config.step, seed=config.seed)

    from rich.console import Console

    from pipeline.models.chat import load_chat

    tokenizer, chat = load_chat(FrozenModelConfig(path=config.tokenizer), config.data)
    rows = encode_rows(data.train, chat, step=config.step, train_on=config.train_on)
    findings = lint(rows, data.eval, chat, step=config.step, max_length=config.max_length)

    console = Console(highlight=False, soft_wrap=True)
    _print_summary(console, config, data, chat)
    for number, row in enumerate(rows[: config.rows], start=1):
        _print_row(console, config, row, tokenizer, number=number)
    _print_findings(console, findings)


def _print_summary(
    console: "Console", config: InspectConfig, data: StageData, chat: "ChatFormat"
) -> None:
    console.print(
        f"step {config.step}: {len(data.train)} training rows, {len(data.eval)} for evaluation",
        markup=False,
    )
    for note in data.notes:
        console.print(f"  {note}", markup=False)
    vocabulary = chat.tokenizer.get_vocab()
    names = {number: token for token, number in vocabulary.items()}
    stops = ", ".join(f"{names[stop]} ({stop})" for stop in chat.stop_ids)
    console.print(f"format {chat.name}; a response ends with {stops}", markup=False)


def _print_row(
    console: "Console",
    config: InspectConfig,
    row: EncodedRow,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    number: int,
) -> None:
    """One row as it was read, and each of its dialogues with the trained tokens marked."""
    example = row.example
    console.print(f"\nrow {number}: {example.origin or 'embedded'}", style="bold", markup=False)
    for name in ("prompt", "chosen", "rejected"):
        for message in getattr(example, name):
            text = " ".join(message.content.split())
            shown = text if len(text) <= 80 else text[:77] + "..."
            console.print(f"  {name:8} {message.role:9} {shown}", markup=False)
    if example.margin is not None:
        console.print(f"  margin   {example.margin:g}", markup=False)
    for name, whole in row.dialogues.items():
        dialogue = _cut(whole, step=config.step, max_length=config.max_length)
        dropped = f", {len(whole) - len(dialogue)} cut off" if len(dialogue) < len(whole) else ""
        console.print(
            f"  {name} as {len(dialogue)} tokens, {dialogue.num_targets} trained{dropped}:",
            style="bold",
            markup=False,
        )
        _print_tokens(console, dialogue, tokenizer)
        if config.token_ids:
            console.print(f"  {dialogue.input_ids}", style="dim", markup=False)


def _cut(dialogue: Encoded, *, step: int, max_length: int) -> Encoded:
    """The row as the step cuts what is too long: step 2 keeps the end, where the score is read."""
    return dialogue.tail(max_length) if step == 2 else dialogue.head(max_length)


def _print_tokens(
    console: "Console", dialogue: Encoded, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    from rich.text import Text

    coloured = console.is_terminal and not console.no_color
    line = Text()
    for piece, trained in marked_text(dialogue, tokenizer):
        if coloured:
            line.append(piece, style="bold green" if trained else "dim")
        else:
            line.append(f"[[{piece}]]" if trained else piece)
    console.print(line)


def marked_text(
    dialogue: Encoded, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[tuple[str, bool]]:
    """The dialogue's text in runs that are trained as a whole, or not."""
    runs = groupby(zip(dialogue.input_ids, dialogue.trained, strict=True), key=lambda pair: pair[1])
    ids: list[int] = []
    text = ""
    for trained, run in runs:
        # Decoding a run by itself would lose the space that sentencepiece tokens begin with.
        ids += [token for token, _ in run]
        longer = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        yield longer[len(text) :], trained
        text = longer


def _print_findings(console: "Console", findings: Sequence[Finding]) -> None:
    from rich.text import Text

    console.print()
    for finding in findings:
        level = Text(f"{finding.level:8}", style=_STYLES[finding.level])
        console.print(level, Text(f"{finding.name:22} {finding.sentence}"))


if __name__ == "__main__":
    run_main(main)
