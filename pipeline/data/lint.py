"""What in the data or its encoding will surprise: the checks behind `pipeline.data.inspect`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.data.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example, Message

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
