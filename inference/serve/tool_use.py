"""What tools change of a request's responses: how they are drawn, and what is read in them."""

import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from inference.serve.generation import Piece
from inference.serve.response_format import Grammar
from inference.serve.schema import ChatRequest
from inference.serve.served import ServedModel
from inference.serve.tool_calls import CallParser, Delta
from inference.serve.tool_formats import MISTRAL, ToolFormat
from inference.serve.tool_prompt import special_marks, tool_format

LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolUse:
    """The tools that the responses of a request may call."""

    form: ToolFormat
    names: tuple[str, ...]
    grammar: Grammar | None = None
    """Where a tool must be called, what a response is made of."""
    shown: dict[int, str] = field(default_factory=dict)
    """Special tokens that mark calls."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a response with calls, besides the template's."""


def tool_use(request: ChatRequest, served: ServedModel) -> ToolUse | None:
    """The tools that a request offers; None where it offers none.

    Raises:
        ApiError: the model's chat template knows no tools, or their calls are of no known form.
    """
    tools = request.offered
    if not tools:
        return None
    form = tool_format(served)
    special = special_marks(served, form)
    forced, several = request.to_be_called, request.parallel_tool_calls is not False
    vocabulary = served.tokenizer.get_vocab()
    return ToolUse(
        form=form,
        names=tuple(tool.function.name for tool in tools),
        grammar=form.grammar(forced, special, several=several) if forced else None,
        shown={token: mark for mark, token in special.items()},
        stop_ids=tuple(vocabulary[each] for each in form.stops if each in vocabulary),
    )


class CallsSoFar:
    """The content and the calls of one response, as its text comes."""

    def __init__(self, use: ToolUse) -> None:
        self._parser = CallParser(use.form, use.names)
        self._form = use.form

    def add(self, piece: Piece) -> dict[str, Any]:
        """What a piece adds, as a delta of OpenAI's streams."""
        deltas = self._parser.add(piece.text)
        if piece.finish is not None:
            deltas += self._parser.finish()
        content = "".join(delta.content for delta in deltas)
        calls: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            if delta.call is not None:
                self._join(calls, delta, delta.call)
        added: dict[str, Any] = {"content": content} if content else {}
        return added | ({"tool_calls": [*calls.values()]} if calls else {})

    def _join(self, calls: dict[int, dict[str, Any]], delta: Delta, number: int) -> None:
        call = calls.setdefault(number, {"index": number, "function": {"arguments": ""}})
        if delta.name is not None:
            call |= {"id": self._new_id(), "type": "function"}
            call["function"]["name"] = delta.name
        call["function"]["arguments"] += delta.arguments

    def message(self, piece: Piece) -> dict[str, Any]:
        """The message of a whole response."""
        added = self.add(piece)
        calls = [
            {name: value for name, value in call.items() if name != "index"}
            for call in added.get("tool_calls", ())
        ]
        message = {"role": "assistant", "content": added.get("content"), "refusal": None}
        if not calls:
            return message | {"content": message["content"] or ""}
        return message | {"tool_calls": calls}

    def finish(self, piece: Piece) -> str | None:
        """Why a response ended; None while it goes on."""
        calls = piece.finish == "stop" and self._parser.num_calls > 0
        return "tool_calls" if calls else piece.finish

    def _new_id(self) -> str:
        """A name for a call; Mistral's templates take nine letters and digits."""
        if self._form is MISTRAL:
            return "".join(secrets.choice(LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
