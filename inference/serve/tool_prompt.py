"""Prompts with tools, calls and their results: by the chat template saved with the model."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inference.serve.errors import ApiError
from inference.serve.schema import ROLES, ChatMessage, has_tools
from inference.serve.served import ServedModel
from inference.serve.tool_fields import Tool
from inference.serve.tool_formats import KNOWN, ToolFormat, format_of, knows_tools
from pipeline.data.continuation import beginning_encoder
from pipeline.data.template import Argument


def tool_format(served: ServedModel) -> ToolFormat:
    """How a model writes calls.

    Raises:
        ApiError: its chat template knows no tools, or has calls in a form that isn't known.
    """
    template = served.chat.template
    if not knows_tools(template):
        raise ApiError(
            400,
            f"the chat template of {served.name} knows no tools; leave tools and their messages"
            " out, or take a model whose template does",
            param="tools",
        )
    form = format_of(template)
    if form is None:
        raise ApiError(
            400,
            f"the chat template of {served.name} has calls of tools in a form that is not known;"
            f" known are {KNOWN}",
            param="tools",
        )
    return form


def special_marks(served: ServedModel, form: ToolFormat) -> dict[str, int]:
    """The marks of calls that are special tokens of a model, with their ids."""
    vocabulary = served.tokenizer.get_vocab()
    ids = {mark: vocabulary[mark] for mark in form.marks if mark in vocabulary}
    return {mark: token for mark, token in ids.items() if token in served.bytes_of.special}


def encode_chat(
    served: ServedModel,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    *,
    continues: bool,
    opens: bool,
    arguments: Mapping[str, Argument] | None,
) -> list[int]:
    """Token ids of a dialogue that the model goes on from, with or without tools.

    Raises:
        ApiError: the template can't render it or doesn't read an argument, or it ends in the
            wrong turn.
    """
    if tools or has_tools(messages):
        return _encode_with_tools(served, messages, tools, opens=opens, arguments=arguments)
    dialogue = [each.message for each in messages]
    return served.encode_chat(dialogue, continues=continues, opens=opens, arguments=arguments)


def _encode_with_tools(
    served: ServedModel,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    *,
    opens: bool,
    arguments: Mapping[str, Argument] | None,
) -> list[int]:
    tool_format(served)
    if messages[-1].role == "assistant" and opens:
        raise ApiError(
            400, "messages must end in a user's turn, or in a tool's result", param="messages"
        )
    chat = served.chat_with(arguments) if arguments else served.chat
    turns = _turns(messages)
    try:
        text = served.tokenizer.apply_chat_template(
            turns,
            tools=[tool.as_template for tool in tools] or None,  # pyright: ignore[reportArgumentType]
            chat_template=chat.template,
            tokenize=False,
            add_generation_prompt=opens,
        )
    except Exception as error:  # noqa: BLE001  # a template is a program, and may raise anything
        reason = " ".join(str(error).split())[:200]
        raise ApiError(
            400, f"the chat template can't render the messages: {reason}", param="messages"
        ) from None
    return beginning_encoder(served.tokenizer)(str(text))


def _turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as templates have them; a result is given the name of what was called."""
    called: dict[str, str] = {}
    turns: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        if message.role == "tool":
            name = called.get(message.tool_call_id or "")
            if name is None:
                raise ApiError(
                    400,
                    f"messages[{place}]: no call before it has the id"
                    f" {json.dumps((message.tool_call_id or '')[:64])}",
                    param="messages",
                )
            result = {"role": "tool", "content": message.text, "name": name}
            turns.append({**result, "tool_call_id": message.tool_call_id})
            continue
        turn: dict[str, Any] = {"role": ROLES[message.role], "content": message.text}
        if message.tool_calls:
            turn["tool_calls"] = [call.as_template for call in message.tool_calls]
            called |= {call.id: call.function.name for call in message.tool_calls}
        turns.append(turn)
    return turns
