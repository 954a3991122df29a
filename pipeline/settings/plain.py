"""Settings as the mappings, lists and words that YAML and the command line have."""

import dataclasses
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.settings.describe import fields_of, items_class, list_settings, without_none

Option = tuple[str, list[str]]
"""A name without its dashes, and the words that follow it: ("data.path", ["a", "b"])."""


def plain(value: object) -> Any:  # noqa: ANN401
    """Dataclasses, tuples and paths as the mappings, lists and strings that YAML has."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields_of(type(value))}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def config_yaml(config: object) -> str:
    """The settings as YAML that `--config` reads back to an equal dataclass."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


def as_options(config: object) -> list[Option]:
    """The settings that differ from their defaults, as the command line takes them.

    An empty command line with these options gives an equal dataclass.
    """
    hints = {each.name: each.kind for each in list_settings(type(config))}
    # Of a method the row's settings are the usual ones.
    row = getattr(config, "METHODS", {}).get(getattr(config, "method", ""), {})
    usual = flatten(plain(type(config)())) | plain(row)
    options: list[Option] = []
    for name, value in flatten(plain(config)).items():
        if name in usual and usual[name] == value:
            continue
        kind = without_none(hints.get(name))
        item = items_class(kind)
        if item is not None:
            words = [json.dumps([_given(each, item) for each in value])]
        elif value is None or isinstance(value, bool):
            words = [json.dumps(value)]
        elif _are_words(value) and typing.get_args(kind)[:1] == (str,):
            words = list(value)
        elif isinstance(value, list | dict):
            words = [json.dumps(value)]
        else:
            words = [str(value)]
        options.append((name, words))
    return options


def _given(item: Mapping[str, Any], item_class: type) -> dict[str, Any]:
    """The settings of one of a list that differ from the defaults of its class."""
    defaults = {each.name: plain(each.default) for each in dataclasses.fields(item_class)}
    return {name: value for name, value in item.items() if value != defaults[name]}


def _are_words(value: object) -> bool:
    """Whether a list of text can stand on the command line as it is, and is not taken for JSON."""
    if not isinstance(value, list) or not value:
        return False
    return not str(value[0]).startswith(("[", "{", "-"))


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name: {"model": {"path": "x"}} is {"model.path": "x"}."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`: {"optim.lr": 1} is {"optim": {"lr": 1}}."""
    settings: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        inner = settings
        for word in sections:
            inner = inner.setdefault(word, {})
        inner[last] = value
    return settings


def portable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A step's settings by dotted name, with paths next to its directory written relative to it.

    So a run that was moved, or is now named by another path, is still the same run.
    """
    root = Path(str(settings.get("output_dir", ""))).parent

    def relative(name: str, value: object) -> object:
        inside = name.endswith(".path") and isinstance(value, str) and Path(value).parent == root
        return f"OUT/{Path(str(value)).name}" if inside else value

    flat = flatten(settings)
    flat.pop("output_dir", None)
    return {name: relative(name, value) for name, value in flat.items()}
