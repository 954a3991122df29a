"""Calls of tools in the text of a response, as it comes.

A call begins once its name is read and is one of the request's tools; its arguments follow as they
stand, character by character. What is not a call, or calls what there is not, is text. The pieces
are those of the whole text, however it comes.
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from inference.serve.tool_formats import PYTHON_TAG, ToolFormat

_NAME_FIRST = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True)
class Delta:
    """What a piece of text adds: to the content, or to a call."""

    content: str = ""
    call: int | None = None
    """Number of the call that goes on."""
    name: str | None = None
    """Of the function, where a call begins."""
    arguments: str = ""


class Value:
    """Finds the end of a JSON value in text that comes in pieces.

    Args:
        depth: how many brackets are open before the text.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def take(self, text: str) -> int | None:
        """One past the value's last character; None where it goes on after the text."""
        for place, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            if not self._depth and not self._in_string and character in '}]"':
                return place + 1
        return None


class CallParser:
    """Takes the text of one response apart.

    Args:
        form: in which the model writes calls.
        names: of the tools that may be called.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = names
        self._held = ""
        """Text of which it isn't known yet what it is."""
        self._space = ""
        """White space that is text only if text follows."""
        self._state = self._between if form.begin else self._first
        self._arguments: Value | None = None
        self.num_calls = 0

    def add(self, text: str) -> list[Delta]:
        """What is certain with more of the text."""
        self._held += text
        return list(self._read(final=False))

    def finish(self) -> list[Delta]:
        """The rest, once no more comes."""
        found = list(self._read(final=True))
        rest = self._space + self._held
        if rest and not (self.num_calls and not rest.strip()):
            found.append(Delta(content=rest))
        self._space = self._held = ""
        return found

    def _read(self, *, final: bool) -> Iterator[Delta]:
        while True:
            state, before = self._state, len(self._held)
            yield from state(final=final)
            if self._state == state and len(self._held) == before:
                return

    def _first(self, *, final: bool) -> Iterator[Delta]:
        """A response that is a call from its first character on, or else is text."""
        text = self._held.lstrip()
        if not final and (not text or PYTHON_TAG.startswith(text)):
            return
        text = text.removeprefix(PYTHON_TAG).lstrip()
        if text.startswith("{"):
            self._held, self._state = text, self._call
        elif text or final:
            self._state = self._text
        yield from ()

    def _text(self, *, final: bool) -> Iterator[Delta]:
        """The rest is text."""
        del final
        if self._held:
            yield Delta(content=self._space + self._held)
            self._held = self._space = ""

    def _between(self, *, final: bool) -> Iterator[Delta]:
        """Text, up to what begins a call."""
        mark, held = self._form.begin, self._held
        place = held.find(mark)
        begins = place >= 0
        if not begins:
            place = len(held) - (0 if final else _may_begin(held, mark))
        text = self._space + held[:place]
        bare = text.rstrip()
        self._space = text[len(bare) :]
        if bare:
            yield Delta(content=bare)
        if begins:
            self._held = held[place + len(mark) :]
            self._state = self._items if self._form.listed else self._call
        else:
            self._held = held[place:]

    def _items(self, *, final: bool) -> Iterator[Delta]:
        """What stands between the calls of a list."""
        del final
        self._held = self._held.lstrip()
        if self._held[:1] in ("[", ","):
            self._held = self._held[1:]
        elif self._held[:1] == "]":
            self._held, self._state = self._held[1:], self._between
        elif self._held[:1] == "{":
            self._state = self._call
        elif self._held:
            self._space += self._form.begin
            self._state = self._between
        yield from ()

    def _call(self, *, final: bool) -> Iterator[Delta]:
        """A call from its beginning on."""
        found = _NAME_FIRST.match(self._held)
        if found and found["name"] in self._names:
            yield self._begin(found["name"])
            self._held = self._held[found.end() :]
            self._arguments, self._state = Value(), self._in_arguments
            return
        end = _end_of_object(self._held)
        if end is None:
            if final:
                self._give_up()
            return
        call = self._whole_call(self._held[:end])
        if call is None:
            self._give_up()
            return
        name, arguments = call
        yield self._begin(name)
        yield Delta(call=self.num_calls - 1, arguments=arguments)
        self._held, self._state = self._held[end:], self._after

    def _whole_call(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of a call with its fields in any order; None where it is none."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            return name, arguments
        return name, json.dumps(arguments or {}, ensure_ascii=False)

    def _in_arguments(self, *, final: bool) -> Iterator[Delta]:
        """The arguments of a call, as they stand."""
        del final
        assert self._arguments is not None
        end = self._arguments.take(self._held)
        text, self._held = self._held[:end], "" if end is None else self._held[end:]
        if text:
            yield Delta(call=self.num_calls - 1, arguments=text)
        if end is not None:
            self._state = self._closing

    def _closing(self, *, final: bool) -> Iterator[Delta]:
        """What is left of a call's object, as Mistral's `id`; some models leave its end out."""
        self._held = self._held.lstrip()
        if self._held.startswith(","):
            end = Value(depth=1).take(self._held)
            if end is not None:
                self._held, self._state = self._held[end:], self._after
            elif final:
                self._held = ""
        elif self._held:
            self._held, self._state = self._held.removeprefix("}"), self._after
        yield from ()

    def _after(self, *, final: bool) -> Iterator[Delta]:
        """What ends a call."""
        self._held = self._held.lstrip()
        if self._form.listed:
            self._state = self._items
        elif not self._form.begin:
            if self._held:
                self._held, self._state = self._held.removeprefix(";"), self._next
        elif self._held.startswith(self._form.end):
            self._held, self._state = self._held.removeprefix(self._form.end), self._between
        elif self._held and (final or not self._form.end.startswith(self._held)):
            self._state = self._between
        yield from ()

    def _next(self, *, final: bool) -> Iterator[Delta]:
        """What stands behind a call that nothing marks."""
        del final
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._call if self._held.startswith("{") else self._text
        yield from ()

    def _begin(self, name: str) -> Delta:
        self._space = ""
        self.num_calls += 1
        return Delta(call=self.num_calls - 1, name=name)

    def _give_up(self) -> None:
        """What looked like a call is text."""
        self._space += self._form.begin
        self._state = self._text if not self._form.begin else self._between


def _end_of_object(text: str) -> int | None:
    """One past the first JSON object in a text that begins with it."""
    bare = text.lstrip()
    if not bare.startswith("{"):
        return 0 if bare else None
    end = Value().take(bare)
    return None if end is None else len(text) - len(bare) + end


def _may_begin(text: str, mark: str) -> int:
    """Characters at the end of a text with which a mark may begin."""
    counts = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((count for count in counts if mark.startswith(text[-count:])), 0)
