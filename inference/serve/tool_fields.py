"""What a request says of tools: OpenAI's `tools`, `tool_choice`, calls and their results."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inference.serve.response_format import LARGEST_MULTIPLE, common_multiple

MOST_TOOLS = 128
LONGEST_TOOLS = 2**16
"""Characters of all tools as JSON."""

NAME = r"^[A-Za-z0-9_.-]{1,64}$"


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True)

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def check(self) -> "Function":
        """Arguments are an object."""
        parameters = self.parameters or {}
        if parameters.get("type", "object") != "object":
            raise ValueError("parameters must be a JSON schema of the type object")
        if common_multiple(parameters) > LARGEST_MULTIPLE:
            raise ValueError(
                f"the least common multiple of all multipleOf is at most {LARGEST_MULTIPLE}"
            )
        return self


class Tool(BaseModel):
    """A tool; functions are the only kind."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: Function

    @property
    def as_template(self) -> dict[str, Any]:
        """As chat templates have it, with what some of them take for granted."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(strict=True)

    name: str


class NamedChoice(BaseModel):
    """A function that is to be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(BaseModel):
    """A function with its arguments, an object in JSON."""

    model_config = ConfigDict(strict=True)

    name: str = Field(pattern=NAME)
    arguments: str = Field(max_length=2**20)

    @model_validator(mode="after")
    def check(self) -> "CalledFunction":
        """Templates are given the arguments as an object."""
        if not _is_object(self.arguments or "{}"):
            raise ValueError("arguments must be an object in JSON, as a string")
        return self


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class ToolCall(BaseModel):
    """A call that the assistant made."""

    model_config = ConfigDict(strict=True)

    id: str = Field(max_length=128)
    type: Literal["function"]
    function: CalledFunction

    @property
    def as_template(self) -> dict[str, Any]:
        """As chat templates have it: arguments are an object."""
        arguments = json.loads(self.function.arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolsField(BaseModel):
    """The tools that a prompt offers."""

    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None

    @model_validator(mode="after")
    def check_tools(self) -> "ToolsField":
        """Each has a name of its own, and all are of a size that can be read."""
        names = [each.function.name for each in self.tools or ()]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two tools are called {name}")
        size = sum(len(json.dumps(each.as_template)) for each in self.tools or ())
        if size > LONGEST_TOOLS:
            raise ValueError(f"tools have at most {LONGEST_TOOLS} characters of JSON in all")
        return self


class ToolFields(ToolsField):
    """Tools, and whether they are called."""

    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def to_be_called(self) -> list[Tool]:
        """Those of which one must be called; none where the model decides."""
        choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            return [each for each in self.offered if each.function.name == choice.function.name]
        return self.offered if choice == "required" else []

    @model_validator(mode="after")
    def check_choice(self) -> "ToolFields":
        """What must be called is there."""
        forced = isinstance(self.tool_choice, NamedChoice) or self.tool_choice == "required"
        if forced and not self.to_be_called:
            raise ValueError("tool_choice names a function that is not among the tools")
        return self
