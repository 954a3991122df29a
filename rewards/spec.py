"""A source of rewards in one word of the command line, or as a mapping of YAML."""

import typing
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from pipeline.errors import ConfigError, suggestion
from pipeline.settings.build import Layer, build_config
from rewards.config import Kind, RewardConfig

KINDS: tuple[str, ...] = typing.get_args(Kind)

_ARGUMENT = {
    "function": "path",
    "json_schema": "path",
    "remote": "path",
    "generative": "path",
    "regex": "pattern",
    "exact": "pattern",
    "length": "max_tokens",
    "math": "column",
    "code": "column",
}
"""The setting that follows a kind's name and a colon."""


def read_spec(spec: str, taken: Collection[str] = (), *, option: str = "--reward") -> RewardConfig:
    """The source that a word describes.

    `file.py:name` is a function; `math`, `exact`, ... a kind; `regex:PATTERN`, `length:256` a kind
    with what it needs; `{kind: length, max_tokens: 256, buffer_tokens: 64}` says all settings.

    Args:
        spec: the word.
        taken: names of other sources; one that is taken gets a number.
        option: in which it stands, for messages.

    Raises:
        ConfigError: it describes no source.
    """
    if spec.lstrip().startswith("{"):
        return source_of(_mapping(spec, option), taken, option=option)
    kind, colon, argument = spec.partition(":")
    if kind.endswith(".py"):
        return source_of({"kind": "function", "path": spec}, taken, option=option)
    if kind not in KINDS:
        raise ConfigError(
            f"{option} {spec}: give file.py:function, a kind, or settings in braces; there is no"
            f" kind {kind}, {suggestion(kind, KINDS)}"
        )
    if not colon:
        return source_of({"kind": kind}, taken, option=option)
    if kind not in _ARGUMENT:
        raise ConfigError(f"{option} {spec}: kind {kind} takes its settings in braces")
    return source_of({"kind": kind, _ARGUMENT[kind]: argument}, taken, option=option)


def source_of(
    settings: Mapping[str, Any], taken: Collection[str] = (), *, option: str = "--reward"
) -> RewardConfig:
    """The source that a mapping of settings describes; a missing name is made up.

    Raises:
        ConfigError: an unknown setting, a wrong type or value.
    """
    kind = str(settings.get("kind", ""))
    if kind not in KINDS:
        what = f"there is no kind {kind}" if kind else "kind is missing"
        raise ConfigError(f"{option} {dict(settings)}: {what}; {suggestion(kind, KINDS)}")
    name = str(settings.get("name") or _name(settings, taken))
    layer = Layer({**settings, "name": name}, option)
    return build_config(RewardConfig, [layer], section=f"rewards.{name}.")


def _mapping(spec: str, option: str) -> Mapping[str, Any]:
    try:
        settings = yaml.safe_load(spec)
    except yaml.YAMLError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{option} {spec} is not a mapping of settings, such as {{kind: math, weight: 2}}"
        )
    return settings


def _name(settings: Mapping[str, Any], taken: Collection[str]) -> str:
    """What a source is called whose settings don't say: its function, or its kind."""
    kind = str(settings.get("kind"))
    base = str(settings.get("path", "")).rpartition(":")[2] if kind == "function" else kind
    numbered = (f"{base}_{number}" for number in range(2, len(taken) + 3))
    return base if base not in taken else next(each for each in numbered if each not in taken)
