from typing import Any

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Example, Message
from pipeline.data.inspect import Finding, encode_rows, lint
from tests.pipeline.data.tokenizers import metaspace


def example(prompt: str, chosen: str = "good", rejected: str = "") -> Example:
    return Example(
        (Message("user", prompt),),
        (Message("assistant", chosen),),
        (Message("assistant", rejected),) if rejected else (),
    )


def findings(
    train: list[Example],
    held_out: list[Example] | None = None,
    chat: ChatFormat | None = None,
    *,
    step: int = 1,
    max_length: int = 1000,
    **encoding: Any,
) -> dict[str, Finding]:
    chat = chat or resolve_format(metaspace(), "plain")
    rows = encode_rows(train, chat, step=step, **encoding)
    found = lint(rows, held_out or [], chat, step=step, max_length=max_length)
    return {finding.name: finding for finding in found}


def test_train_prompts_in_eval_are_found_whatever_their_case_and_spacing() -> None:
    found = findings([example("What is it?"), example("Else")], [example("what  is\nit? ")])

    assert found["train rows in eval"].count == 1
