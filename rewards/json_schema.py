"""Responses that are JSON of a given form.

The keywords of JSON Schema (2020-12) that programs write for their types, such as Pydantic, are
understood; a schema with any other keyword is refused, since leaving one out would pass responses
that break it.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.errors import ConfigError
from rewards.config import RewardConfig
from rewards.contract import Episode
from rewards.scorer import Scorer, one_by_one

Json = Any
"""What JSON holds: dict, list, str, int, float, bool, None."""

_ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "format", "$comment"),
    *("$schema", "$id", "$defs", "definitions", "readOnly", "writeOnly"),
}
_OF_SCHEMA = ("items", "additionalProperties", "not")
_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMED_SCHEMAS = ("properties", "$defs", "definitions")

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def json_schema_scorer(config: RewardConfig, text: str | None) -> Scorer:
    """1 if the response is JSON that the schema allows, else 0.

    Args:
        config: the settings of the source.
        text: the schema of all rows; None reads each row's own, and a row without one has no
            reward.

    Raises:
        ConfigError: the schema is no JSON or has a keyword that is not understood.
    """
    where = f"rewards.{config.name}.path"
    schema = None if text is None else read_schema(text, f"{where}: {config.path}")
    column = config.reads_column or ""

    def score(episode: Episode) -> float | None:
        own = episode.extra.get(column) if schema is None else schema
        if own is None:
            return None
        if schema is None:
            own = read_schema(own, f"the column {column}")
        value, is_json = read_json(episode.response)
        return float(is_json and matches(value, own, own))

    return one_by_one(score)


def read_schema(schema: object, where: str) -> Json:
    """A schema, from its text or as it is, once all its keywords are known to be understood.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} is not valid JSON: {error}") from None
    _check(schema, schema, where)
    return schema


def read_json(response: str) -> tuple[Json, bool]:
    """The value that a response is, whole or in its only fenced block, and whether it is one."""
    fenced = _FENCED.findall(response)
    text = fenced[0] if len(fenced) == 1 else response
    try:
        return json.loads(text, parse_constant=_refuse_constant), True
    except (ValueError, RecursionError):
        return None, False


def matches(value: Json, schema: Json, root: Json) -> bool:
    """Whether a JSON value is one that the schema allows; `root` is what `$ref` refers to."""
    if isinstance(schema, bool):
        return schema
    return all(
        _KEYWORDS[keyword](value, argument, schema, root)
        for keyword, argument in schema.items()
        if keyword not in _ANNOTATIONS
    )


def _check(schema: Json, root: Json, where: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ConfigError(f"{where} is no JSON schema: it holds {schema!r} where one belongs")
    for keyword, argument in schema.items():
        if keyword not in _KEYWORDS and keyword not in _ANNOTATIONS:
            raise ConfigError(
                f"{where} has the keyword {keyword}, which is not understood; known are"
                f" {', '.join(sorted(_KEYWORDS))}"
            )
        if keyword == "$ref":
            _referred(argument, root, where)
        for each in _inner(keyword, argument):
            _check(each, root, where)


def _inner(keyword: str, argument: Json) -> list[Json]:
    """The schemas that the argument of a keyword holds."""
    if keyword in _OF_SCHEMA:
        return [argument]
    if keyword in _OF_SCHEMAS:
        return list(argument)
    return list(argument.values()) if keyword in _OF_NAMED_SCHEMAS else []


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _referred(reference: str, root: Json, where: str = "the schema") -> Json:
    """What `#/$defs/name` stands for."""
    found = root
    for part in reference.split("/")[1:]:
        found = found.get(part) if isinstance(found, Mapping) else None
    if not reference.startswith("#") or found is None:
        raise ConfigError(f"{where} refers to {reference}, which is not in it")
    return found


def _has_type(value: Json, kinds: str | Sequence[str]) -> bool:
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return any(_TYPES[kind](value) for kind in kinds)


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: dict[str, Callable[[Json], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == math.floor(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _same(one: Json, other: Json) -> bool:
    """Equality of JSON, in which true is not 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _further_properties(value: Json, argument: Json, schema: Json, root: Json) -> bool:
    known = schema.get("properties", {})
    return all(matches(each, argument, root) for key, each in value.items() if key not in known)


def _further_items(value: Json, argument: Json, schema: Json, root: Json) -> bool:
    first = len(schema.get("prefixItems", []))
    return all(matches(each, argument, root) for each in value[first:])


def _is_multiple(value: Json, argument: Json) -> bool:
    quotient = value / argument
    return math.isclose(quotient, round(quotient), rel_tol=1e-12)


_Keyword = Callable[[Json, Json, Json, Json], bool]


def _of(kind: str, check: Callable[[Json, Json], bool]) -> _Keyword:
    """A keyword about values of one type, which all others pass."""
    return lambda value, argument, _schema, _root: not _TYPES[kind](value) or check(value, argument)


def _within(kind: str, check: _Keyword) -> _Keyword:
    """The same, for a keyword that holds further schemas."""
    return lambda value, argument, schema, root: (
        not _TYPES[kind](value) or check(value, argument, schema, root)
    )


_KEYWORDS: dict[str, _Keyword] = {
    "type": lambda value, kinds, _schema, _root: _has_type(value, kinds),
    "enum": lambda value, choices, _schema, _root: any(_same(value, each) for each in choices),
    "const": lambda value, constant, _schema, _root: _same(value, constant),
    "minimum": _of("number", lambda value, bound: value >= bound),
    "maximum": _of("number", lambda value, bound: value <= bound),
    "exclusiveMinimum": _of("number", lambda value, bound: value > bound),
    "exclusiveMaximum": _of("number", lambda value, bound: value < bound),
    "multipleOf": _of("number", _is_multiple),
    "minLength": _of("string", lambda value, length: len(value) >= length),
    "maxLength": _of("string", lambda value, length: len(value) <= length),
    "pattern": _of("string", lambda value, pattern: re.search(pattern, value) is not None),
    "minItems": _of("array", lambda value, count: len(value) >= count),
    "maxItems": _of("array", lambda value, count: len(value) <= count),
    "uniqueItems": _of(
        "array",
        lambda value, wanted: (
            not wanted or not any(_same(a, b) for n, a in enumerate(value) for b in value[:n])
        ),
    ),
    "minProperties": _of("object", lambda value, count: len(value) >= count),
    "maxProperties": _of("object", lambda value, count: len(value) <= count),
    "required": _of("object", lambda value, names: all(name in value for name in names)),
    "properties": _within(
        "object",
        lambda value, known, _schema, root: all(
            matches(value[key], each, root) for key, each in known.items() if key in value
        ),
    ),
    "additionalProperties": _within("object", _further_properties),
    "prefixItems": _within(
        "array",
        lambda value, first, _schema, root: all(
            matches(item, each, root) for item, each in zip(value, first, strict=False)
        ),
    ),
    "items": _within("array", _further_items),
    "anyOf": lambda value, each, _schema, root: any(matches(value, one, root) for one in each),
    "allOf": lambda value, each, _schema, root: all(matches(value, one, root) for one in each),
    "oneOf": lambda value, each, _schema, root: sum(matches(value, one, root) for one in each) == 1,
    "not": lambda value, other, _schema, root: not matches(value, other, root),
    "$ref": lambda value, name, _schema, root: matches(value, _referred(name, root), root),
}
"""By keyword: whether a value obeys it, from (value, its argument, schema, root)."""
