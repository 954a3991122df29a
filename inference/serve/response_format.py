"""What a request says of the form of its responses: JSON, a schema of it, or a pattern."""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

LONGEST_SCHEMA = 2**16
LONGEST_REGEX = 2**13
LARGEST_MULTIPLE = 10_000
"""Of what numbers may be multiples of: it takes a state for each remainder, seconds for a million.
"""


class Grammar(NamedTuple):
    """The form that a response must have, as a text in one of three languages."""

    kind: Literal["schema", "regex", "lark"]
    text: str
    """A JSON schema, a regular expression, or a grammar in llguidance's form."""
    field: str
    """Of the request, for sentences."""


class JsonSchema(BaseModel):
    """OpenAI's `response_format.json_schema`; its name and description count for nothing."""

    model_config = ConfigDict(strict=True)

    content: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check(self) -> "ResponseFormat":
        """A schema belongs to its type, and is of a size that can be read."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, which needs it")
        if self.json_schema and len(json.dumps(self.json_schema.content)) > LONGEST_SCHEMA:
            raise ValueError(f"a schema has at most {LONGEST_SCHEMA} characters")
        if self.json_schema and common_multiple(self.json_schema.content) > LARGEST_MULTIPLE:
            raise ValueError(
                f"the least common multiple of all multipleOf is at most {LARGEST_MULTIPLE}"
            )
        return self


class FormFields(BaseModel):
    """The fields of a request that say which form a response has."""

    response_format: ResponseFormat | None = None
    regex: str | None = Field(default=None, max_length=LONGEST_REGEX)

    @property
    def grammar(self) -> Grammar | None:
        """What responses are guided by; None is nothing."""
        if self.regex:
            return Grammar("regex", self.regex, "regex")
        form = self.response_format
        if form is None or form.type == "text":
            return None
        schema = {"type": "object"} if form.json_schema is None else form.json_schema.content
        return Grammar("schema", json.dumps(schema), "response_format")

    @model_validator(mode="after")
    def check_form(self) -> "FormFields":
        """Refuse a request that asks for two forms."""
        if self.regex and self.response_format and self.response_format.type != "text":
            raise ValueError("regex and response_format exclude each other")
        return self


def common_multiple(schema: object) -> int:
    """The least of all `multipleOf`, in units of the last decimal place that one of them has."""
    steps = [Decimal(str(step)).normalize() for step in _steps(schema) if 0 < step < math.inf]
    places = max((-int(step.as_tuple().exponent) for step in steps), default=0)
    return math.lcm(*(int(step.scaleb(max(0, places))) for step in steps))


def _steps(schema: object) -> Iterator[int | float]:
    """The value of each `multipleOf` anywhere in a schema."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            step = part.get("multipleOf")
            if isinstance(step, int | float) and not isinstance(step, bool):
                yield step
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
