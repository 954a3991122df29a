"""Verifiers: matches, patterns, JSON schemas, prices of length and repetition, the demo task."""

import json
import re
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, SchemaRegistry

from pipeline.demo.task import verdict
from pipeline.errors import ConfigError
from rewards.config import RewardConfig
from rewards.contract import Episode, Scorer, one_by_one


def exact_scorer(config: RewardConfig) -> Scorer:
    """1 if the response is the answer, but for space around and between words, else 0.

    With a pattern its first group, at its last match, is compared instead of the whole response;
    where it doesn't match the response is wrong. A row without an answer has no reward.
    """
    pattern = compiled(config) if config.pattern else None
    column = config.reads_column

    def score(episode: Episode) -> float | None:
        answer = episode.extra.get(column or "")
        if answer is None:
            return None
        given = episode.response
        if pattern is not None:
            matches = list(pattern.finditer(given))
            if not matches:
                return 0.0
            given = matches[-1][1 if pattern.groups else 0] or ""
        return float(_words(given) == _words(str(answer)))

    return one_by_one(score)


def regex_scorer(config: RewardConfig) -> Scorer:
    """1 if the pattern is found in the response, else 0; `.` matches line ends too."""
    pattern = compiled(config)
    return one_by_one(lambda episode: float(pattern.search(episode.response) is not None))


def compiled(config: RewardConfig) -> re.Pattern[str]:
    """The pattern of the settings; a `ConfigError` says what is wrong with it."""
    try:
        return re.compile(config.pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"rewards.{config.name}.pattern is not a regular expression: {error}"
        ) from None


def _words(text: str) -> list[str]:
    return text.split()


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


def length_scorer(config: RewardConfig) -> Scorer:
    """0 up to `max_tokens`, falling linearly to -1 over the next `buffer_tokens`.

    DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), whose L_max is
    max_tokens + buffer_tokens and whose L_cache is buffer_tokens.
    """
    free, buffer = config.max_tokens or 0, config.buffer_tokens

    def score(episode: Episode) -> float:
        over = episode.num_tokens - free
        if over <= 0:
            return 0.0
        return -1.0 if over >= buffer else -over / buffer

    return one_by_one(score)


def repetition_scorer(config: RewardConfig) -> Scorer:
    """Minus the share of phrases of `ngram` words that occurred before: 0 to -1.

    As the repetition penalty of Yeo et al. 2025 (arXiv:2502.03373), per response. A response with
    fewer words has no phrase and costs nothing.
    """

    def score(episode: Episode) -> float:
        words = episode.response.lower().split()
        shifted = (islice(words, start, None) for start in range(config.ngram))
        phrases = list(zip(*shifted, strict=False))
        return len(set(phrases)) / len(phrases) - 1.0 if phrases else 0.0

    return one_by_one(score)


def verifier_scorer(config: RewardConfig) -> Scorer:
    """1 for a response that is correct and polite, else 0; None where the row has no answer."""
    column = config.reads_column
    assert column is not None

    def score(episode: Episode) -> float | None:
        right = episode.extra.get(column)
        if not isinstance(right, str):
            return None
        return float(verdict("", right, episode.response).both)

    return one_by_one(score)
