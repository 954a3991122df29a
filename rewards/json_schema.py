"""Responses that are JSON of a given form, by JSON Schema (2020-12; `jsonschema` reads it)."""

import json
import re
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, SchemaRegistry

from pipeline.errors import ConfigError
from rewards.config import RewardConfig
from rewards.contract import Episode
from rewards.scorer import Scorer, one_by_one

Json = Any
"""What JSON holds: dict, list, str, int, float, bool, None."""

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def json_schema_scorer(config: RewardConfig, text: str | None) -> Scorer:
    """1 if the response is JSON that the schema allows, else 0.

    Args:
        config: the settings of the source.
        text: the schema of all rows; None reads each row's own, and a row without one has no
            reward.

    Raises:
        ConfigError: the schema is none.
    """
    where = f"rewards.{config.name}.path"
    schema = None if text is None else read_schema(text, f"{where}: {config.path}")
    column = config.reads_column or ""

    def score(episode: Episode) -> float | None:
        own = schema
        if own is None:
            found = episode.extra.get(column)
            if found is None:
                return None
            own = read_schema(found, f"the column {column}")
        value, is_json = read_json(episode.response)
        return float(is_json and own.is_valid(value))

    return one_by_one(score)


def read_schema(schema: Json, where: str) -> Draft202012Validator:
    """A schema, from its text or as it is.

    Raises:
        ConfigError: it is not JSON, no schema, or refers to what isn't in it.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} is not valid JSON: {error}") from None
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"{where} is not a JSON schema: {error.message}") from None
    resource = DRAFT202012.create_resource(schema)
    uri = resource.id() or ""
    # Nothing but the schema itself, so that no reference is fetched from the network.
    registry: SchemaRegistry = Registry().with_resource(uri, resource)
    _check_references(registry, uri, schema, where)
    return Draft202012Validator(schema, registry=registry)


def read_json(response: str) -> tuple[Json, bool]:
    """The value that a response is, whole or in its only fenced block, and whether it is one."""
    fenced = _FENCED.findall(response)
    text = fenced[0] if len(fenced) == 1 else response
    try:
        return json.loads(text, parse_constant=_refuse_constant), True
    except (ValueError, RecursionError):
        return None, False


def _check_references(registry: SchemaRegistry, uri: str, part: Json, where: str) -> None:
    """Resolve each `$ref` now: a value might never reach it, and a run should not end by it."""
    if isinstance(part, list):
        for each in part:
            _check_references(registry, uri, each, where)
    if not isinstance(part, dict):
        return
    reference = part.get("$ref")
    if isinstance(reference, str):
        try:
            registry.resolver(uri).lookup(reference)
        except Unresolvable:
            raise ConfigError(f"{where} refers to {reference}, which is not in it") from None
    for each in part.values():
        _check_references(registry, uri, each, where)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)
