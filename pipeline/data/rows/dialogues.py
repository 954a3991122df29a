"""Dialogues as texts and as turns: parsing, the last response, and the history that is kept."""

import re
from collections.abc import Sequence
from dataclasses import replace

from pipeline.data.examples import Example, Message, Role

Turns = tuple[Message, ...]

# The form of hh-rlhf: "\n\nHuman: ...\n\nAssistant: ...".
_MARKER = re.compile(r"\n\n(Human|Assistant):")
# The form of DeepSpeed-Chat's prompts, on one line: " Human: ... Assistant:".
_ONE_LINE = re.compile(r"\A\s*Human:(?P<user>.*)\sAssistant:(?P<assistant>.*)\Z", re.DOTALL)
_ROLES: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}


def parse_dialogue(text: str) -> Turns | None:
    """The turns of a "Human: ... Assistant: ..." text; None where it isn't one.

    An empty "Assistant:" at the end, which asks for the response, is not a turn.
    """
    text = "\n\n" + text.lstrip()
    if not text.startswith("\n\nHuman:"):
        return None
    marks = list(_MARKER.finditer(text))
    one_line = _ONE_LINE.match(text) if len(marks) == 1 else None
    if one_line is not None:
        turns = [("Human", one_line["user"]), ("Assistant", one_line["assistant"])]
    else:
        ends = [*(mark.start() for mark in marks[1:]), len(text)]
        turns = [(mark[1], text[mark.end() : end]) for mark, end in zip(marks, ends, strict=True)]
    messages = [Message(_ROLES[name], content.strip()) for name, content in turns]
    if messages[-1] == Message("assistant", ""):
        messages.pop()
    return join_turns(messages)


def join_turns(messages: Sequence[Message]) -> Turns:
    """`messages` with neighbours of one role joined by a blank line.

    Many chat formats refuse dialogues in which the roles don't take turns.
    """
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last and (last.role, last.trained) == (message.role, message.trained):
            content = f"{last.content}\n\n{message.content}"
            joined[-1] = replace(last, content=content.strip("\n"))
        else:
            joined.append(message)
    return tuple(joined)


def last_response(turns: Turns) -> tuple[Turns, Turns]:
    """(prompt, response) of one dialogue: the response is its last assistant turn.

    A dialogue that ends in a user turn is a prompt without a response.
    """
    if turns and turns[-1].role == "assistant":
        return turns[:-1], turns[-1:]
    return turns, ()


def common_prompt(chosen: Turns, rejected: Turns) -> tuple[Turns, Turns, Turns] | None:
    """(prompt, chosen, rejected) of two whole dialogues: the prompt is what they share.

    The prompt ends in a user turn and each response in an assistant turn. None where that can't be:
    one of them has no response to the last user turn they share.
    """
    shared = 0
    for ours, theirs in zip(chosen, rejected, strict=False):
        if ours != theirs:
            break
        shared += 1
    while shared and chosen[shared - 1].role != "user":
        shared -= 1
    # What follows the last response answers nobody. It is taken off behind the shared prompt, which
    # an unanswered dialogue must not shorten: the other's answer would become part of a response.
    ours, theirs = (_ending_in_assistant(turns[shared:]) for turns in (chosen, rejected))
    return (chosen[:shared], ours, theirs) if shared and ours and theirs else None


def _ending_in_assistant(turns: Turns) -> Turns:
    while turns and turns[-1].role != "assistant":
        turns = turns[:-1]
    return turns


def with_history(prompt: Turns, history: str) -> Turns:
    """The prompt with as much of its history as `data.history` names.

    Args:
        prompt: a dialogue that ends in a user turn; empty of plain text.
        history: all; user, what users wrote alone, as one turn; last:N, the last N user turns and
            the turns between them. System messages stay.
    """
    if history == "all" or not prompt:
        return prompt
    system = tuple(turn for turn in prompt if turn.role == "system")
    users = [place for place, turn in enumerate(prompt) if turn.role == "user"]
    if history == "user":
        return (*system, *join_turns([prompt[place] for place in users]))
    kept = users[-int(history.removeprefix("last:")) :]
    first = kept[0] if kept else len(prompt)
    return (*system, *(turn for turn in prompt[first:] if turn.role != "system"))


def histories(examples: list[Example], history: str) -> list[Example]:
    """The examples with prompts that have lost the turns which `history` leaves out."""
    if history == "all":
        return examples
    return [replace(each, prompt=with_history(each.prompt, history)) for each in examples]
