"""How models write calls of tools, as their chat templates show it.

Three forms are known: Hermes's and Qwen's, `<tool_call>{"name": ..., "arguments": ...}` and
`</tool_call>`; Mistral's, `[TOOL_CALLS] [{"name": ..., "arguments": ...}]`; Llama 3's, an object
with `name` and `parameters` in the place of a text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inference.serve.response_format import Grammar
from inference.serve.tool_fields import Tool

SPACE = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n\r]{1,40}"}


@dataclass(frozen=True)
class ToolFormat:
    """One form."""

    name: str

    begin: str
    """Before a call, or before the list of all; nothing where a text begins with a call."""

    end: str
    """What follows a call, or the list of all."""

    arguments: str = "arguments"
    """The field that has them."""

    listed: bool = False
    """Whether calls are the items of one list."""

    stops: tuple[str, ...] = ()
    """Tokens that end a response with calls, besides those of the template."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and are read though."""
        return tuple(each for each in (self.begin, self.end, PYTHON_TAG) if each)

    def grammar(
        self, tools: Sequence[Tool], special: Mapping[str, int], *, several: bool
    ) -> Grammar:
        """What a response that calls one of these tools, or several times one, is made of.

        Args:
            tools: that may be called.
            special: ids of marks that are special tokens.
            several: whether there may be more calls than one.
        """
        mark = {
            each: f"<[{special[each]}]>" if each in special else json.dumps(each)
            for each in self.marks
        }
        if self.listed:
            calls = 'call (", " call)*' if several else "call"
            start = f'{mark[self.begin]} GAP "[" {calls} "]"'
        elif self.begin:
            one = f"{mark[self.begin]} GAP call GAP {mark[self.end]}"
            start = f"{one} (GAP {one})*" if several else one
        else:
            start = 'call (";" GAP call)*' if several else "call"
        heads = [
            json.dumps(f'{{"name": "{tool.function.name}", "{self.arguments}": ') for tool in tools
        ]
        calls = " | ".join(f'{head} object_{n} "}}"' for n, head in enumerate(heads))
        lines = [f"start: {start}", f"call: {calls}", "GAP: /[ \\n]{0,1}/"]
        lines += [f"object_{n}: %json {_schema(tool)}" for n, tool in enumerate(tools)]
        return Grammar("lark", "\n".join(lines), "tools")


def _schema(tool: Tool) -> str:
    """Of the arguments; in a rule of its own, which `$ref` is relative to."""
    return json.dumps({"type": "object", **(tool.function.parameters or {}), "x-guidance": SPACE})


PYTHON_TAG = "<|python_tag|>"
"""Llama 3 may have it before a call."""

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", listed=True)
LLAMA3 = ToolFormat("llama3", "", "", arguments="parameters", stops=("<|eom_id|>",))

KNOWN = "those of Hermes and Qwen (<tool_call> with JSON), Mistral ([TOOL_CALLS]) and Llama 3"


def knows_tools(template: str) -> bool:
    """Whether a chat template reads tools at all."""
    return re.search(r"\btools\b", template) is not None


def format_of(template: str) -> ToolFormat | None:
    """The form in which a chat template has calls written; None where it is another one."""
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "ipython" in template and "parameters" in template:
        return LLAMA3
    return None
