"""An environment made from a class whose public methods are tools.

A response calls tools with JSON objects: `<tool_call>{"name": "add", "arguments": {"a": 1, "b":
2}}</tool_call>`. The next user turn contains the results in the same order, each in
`<tool_response>...</tool_response>`. A response without a call ends the episode. An invalid call,
or a tool that raises ValueError, yields an error message; other exceptions fail the episode.

The class has the interface of TRL's trainers: `reset(**row)`, whose returned text, if any, is added
to the last user turn; methods with type annotations and docstrings; `get_reward()` or `reward`.
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from pipeline.data.examples import Message
from rewards.environments.file import REWARD_NAMES, is_tool

_CALL_PATTERN = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)

INSTRUCTIONS_TEMPLATE = (
    'You can use tools. To call one, write <tool_call>{{"name": NAME, "arguments": {{...}}}}'
    "</tool_call>; the next message contains its result. A response without a call is final."
    "\n\n{tools}"
)
"""Description of the tools for the model. The attribute `INSTRUCTIONS` of a class replaces it; an
empty one omits it."""


class ToolEnvironment:
    """An environment that wraps an object of a user's tool class."""

    def __init__(self, instance: object) -> None:
        self._instance: Any = instance
        self._tools = {name: getattr(instance, name) for name in find_tools(type(instance))}
        self._types = {name: typing.get_type_hints(tool) for name, tool in self._tools.items()}

    def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        """Return the row's dialogue, with a system message about tools and the text of `reset`."""
        arguments = {**row, "seed": seed}
        parameters = inspect.signature(self._instance.reset).parameters
        if all(item.kind is not inspect.Parameter.VAR_KEYWORD for item in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        text = self._instance.reset(**arguments)
        if text is not None and not isinstance(text, str):
            raise TypeError(f"reset returned {type(text).__name__}, not a string or None")
        *earlier, last = (Message(turn["role"], turn["content"]) for turn in row["dialogue"])
        if text:
            last = Message(last.role, f"{last.content}\n\n{text}")
        instructions = getattr(self._instance, "INSTRUCTIONS", None)
        if instructions is None:
            instructions = INSTRUCTIONS_TEMPLATE.format(
                tools="\n\n".join(map(describe_tool, self._tools.values()))
            )
        if instructions and earlier and earlier[0].role == "system":  # templates allow one
            earlier[0] = Message("system", f"{earlier[0].content}\n\n{instructions}")
        elif instructions:
            earlier.insert(0, Message("system", instructions))
        return [*earlier, last]

    def step(self, response: str) -> list[Message] | None:
        """Return the results of the calls in a response, or None if it contains no call."""
        results = [self._run_call(text) for text in _CALL_PATTERN.findall(response)]
        if not results:
            return None
        # A call may contain a lone surrogate, which can't be encoded.
        texts = [result.encode(errors="replace").decode() for result in results]
        lines = [f"<tool_response>{text}</tool_response>" for text in texts]
        return [Message("user", "\n".join(lines))]

    def reward(self) -> float | Mapping[str, float] | None:
        """Return the value of the method or attribute `get_reward` or `reward`, if there is one."""
        for name in REWARD_NAMES:
            if hasattr(self._instance, name):
                reward: Any = getattr(self._instance, name)
                value: Any = reward() if callable(reward) else reward
                return value
        return None

    def _run_call(self, text: str) -> str:
        """Return the result of a call, or an error message if it is invalid or fails."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError) as error:  # such as huge numbers or deep nesting
            return f"error: the call is not JSON: {error}"
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return 'error: a call is an object with "name" and "arguments"'
        name, arguments = call["name"], call.get("arguments", {})
        if name not in self._tools:
            return f"error: there is no tool {name}; the tools are {', '.join(sorted(self._tools))}"
        tool = self._tools[name]
        problem = argument_error(tool, arguments, self._types[name])
        if problem:
            return f"error: {name}: {problem}"
        try:
            return as_text(tool(**arguments))
        except ValueError as error:
            return f"error: {name}: {error}"


def find_tools(cls: type) -> dict[str, Callable[..., object]]:
    """Return the tools of a class, by name.

    Raises:
        TypeError: a tool has no docstring, or an argument has no type annotation.
    """
    tools = {name: getattr(cls, name) for name in dir(cls) if is_tool(name)}
    tools = {name: tool for name, tool in tools.items() if inspect.isroutine(tool)}
    for name, tool in tools.items():
        _, *arguments = inspect.signature(tool).parameters.values()
        if not inspect.getdoc(tool):
            raise TypeError(f"the tool {name} needs a docstring, which describes it to the model")
        for argument in arguments:
            if argument.annotation is argument.empty:
                raise TypeError(f"argument {argument.name} of tool {name} has no type annotation")
    return tools


def describe_tool(tool: Callable[..., object]) -> str:
    """Describe a tool to the model: its signature and docstring."""
    return f"{tool.__name__}{inspect.signature(tool)}: {inspect.getdoc(tool) or ''}"


def argument_error(
    tool: Callable[..., object], arguments: object, hints: Mapping[str, Any]
) -> str | None:
    """Return the reason why a tool can't be called with these arguments, or None if it can."""
    if not isinstance(arguments, dict):
        return f'"arguments" must be an object, got {json.dumps(arguments)}'
    signature = inspect.signature(tool)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        return f"{error}; it takes {signature}"
    for name, value in arguments.items():
        if name in hints and not matches_annotation(value, hints[name]):
            expected = inspect.formatannotation(hints[name])
            return f"{name} must be {expected}, got {json.dumps(value)}"
    return None


def matches_annotation(value: object, annotation: Any) -> bool:  # noqa: ANN401
    """Return whether a JSON value matches an annotation; types that JSON lacks match any value."""
    try:
        TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except PydanticSchemaGenerationError:
        return True
    except ValidationError:
        return False
    return True


def as_text(result: object) -> str:
    """Convert a tool's return value to text: strings are unchanged, other values become JSON."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


class Calculator:
    """Addition, subtraction, multiplication and division: `--environment calculator`.

    `python -m pipeline.demo.arithmetic --calculator true` writes rows whose demonstrations call it.
    Any source, such as `--reward math`, can reward the last response.
    """

    INSTRUCTIONS = ""  # the demonstrations show the calls

    def reset(self, **row: object) -> None:
        """Do nothing: calls are independent."""

    def add(self, a: float, b: float) -> float:
        """Return the sum a + b."""
        return a + b

    def subtract(self, a: float, b: float) -> float:
        """Return the difference a - b."""
        return a - b

    def multiply(self, a: float, b: float) -> float:
        """Return the product a * b."""
        return a * b

    def divide(self, a: float, b: float) -> float:
        """Return the quotient a / b."""
        if b == 0:
            raise ValueError("the divisor is 0")
        try:
            return a / b
        except OverflowError:
            raise ValueError("the quotient has too many digits") from None
