"""Dataclasses of settings built from nested mappings and dotted options, with clear errors.

A name such as `actor.optim.lr` is a path through nested dataclasses. Types are checked by
jsonargparse, ranges and contradictions by the dataclasses themselves; whatever fails, the message
is one sentence that starts with the setting's full name.
"""

import dataclasses
import functools
import json
import re
import typing
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentParser, Namespace

from pipeline.errors import ConfigError, raise_all
from pipeline.settings.deepspeed_chat import hint_for_step
from pipeline.settings.describe import (
    did_you_mean,
    fields_of,
    items_class,
    list_of_word,
    list_settings,
    section_class,
    without_none,
)
from pipeline.settings.plain import Option
from pipeline.settings.words import as_word, items_of, one_sentence

C = TypeVar("C")


@dataclass(frozen=True)
class Layer:
    """Settings from one place, nested as in the dataclass; later layers win."""

    settings: Mapping[str, Any]

    origin: str
    """Where they came from, for error messages."""

    is_file: bool = False
    """Whether `origin` is a file that a user can mend."""


def build_config(
    config_class: type[C],
    layers: Sequence[Layer],
    overrides: Sequence[Option] = (),
    *,
    section: str = "",
) -> C:
    """An instance of the dataclass `config_class`, with types and ranges checked.

    Args:
        config_class: a frozen dataclass; its fields may be dataclasses.
        layers: settings in order of rising precedence.
        overrides: dotted names and their words from the command line; these win.
        section: what a message puts before the setting's name, such as "sft.".

    Raises:
        ConfigError: an unknown setting, a wrong type, a value out of range, a contradiction.
    """
    values = _parsed(config_class, layers, overrides, section)
    try:
        return _instantiate(config_class, values, section)
    except ConfigError as error:
        raise ConfigError(_with_file(str(error), layers, overrides, section)) from None


def typed_settings(
    config_class: type,
    layers: Sequence[Layer],
    overrides: Sequence[Option] = (),
    *,
    section: str = "",
) -> dict[str, Any]:
    """What `build_config` would put into its instance, by dotted name; only types are checked.

    Raises:
        ConfigError: an unknown setting or a wrong type.
    """
    return vars(_parsed(config_class, layers, overrides, section).as_flat())


def _parsed(
    config_class: type, layers: Sequence[Layer], overrides: Sequence[Option], section: str
) -> Namespace:
    """The layers and the overrides on one another, each value of its setting's type."""
    merged: dict[str, Any] = {}
    for layer in layers:
        _check_names(config_class, layer, section)
        _merge(config_class, merged, layer.settings)
    arguments = ["--config", json.dumps(merged, default=str)] if merged else []
    raise_all(
        _unknown(config_class, name, section=section, place="")
        for name, _ in overrides
        if _type_of(config_class, name) is None
    )
    for name, words in overrides:
        kind = _type_of(config_class, name)
        given = words
        if (item := items_class(kind)) is not None:
            found = list_of_word(item, " ".join(words))
            given = words if found is None else [json.dumps(found)]
            _check_items(item, _read_list(given), f"{section}{name}", place="")
        arguments.append(f"--{name}={as_word(f'--{section}{name}', kind, given)}")
    try:
        return _parser(config_class).parse_args(arguments)
    except ArgumentError as error:
        sentence = one_sentence(str(error), section)
        raise ConfigError(_with_file(sentence, layers, overrides, section)) from None


@functools.cache
def _parser(config_class: type) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, default_env=False, add_help=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(config_class)
    return parser


def _type_of(config_class: type, name: str) -> object:
    """The type of the setting `name`; None where there is no such setting."""
    head, _, rest = name.partition(".")
    hints = typing.get_type_hints(config_class)
    kind = {field.name: hints[field.name] for field in fields_of(config_class)}.get(head)
    if kind is None or not rest:
        return kind
    inner = section_class(kind)
    if inner is not None:
        return _type_of(inner, rest)
    return str if typing.get_origin(kind) is dict else None  # data.fields.prompt


def _check_names(config_class: type, layer: Layer, section: str) -> None:
    """Raise unless every name in the layer is a setting, and every section holds settings."""

    def walk(settings: Mapping[str, Any], prefix: str) -> None:
        for key, value in settings.items():
            name = prefix + str(key)
            kind = _type_of(config_class, name)
            if kind is None:
                place = f" in {layer.origin}"
                raise _unknown(config_class, name, section=section, place=place)
            if (item := items_class(kind)) is not None and value is not None:
                _check_items(item, value, section + name, place=f" in {layer.origin}")
            if section_class(kind) is None:
                continue
            if isinstance(value, Mapping):
                walk(value, name + ".")
            elif value is not None or section_class(kind) is kind:
                raise ConfigError(f"{section}{name} in {layer.origin} holds no settings: {value}")

    walk(layer.settings, "")


def _read_list(words: Sequence[str]) -> object:
    """What jsonargparse will read: JSON, or YAML as in settings files; else the text itself."""
    text = " ".join(words)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _check_items(item_class: type, value: object, name: str, *, place: str) -> None:
    """Raise unless `value` lists settings of `item_class`, with names that it has."""
    if list_of_word(item_class, value) is not None:
        return
    items = value if isinstance(value, list | tuple) else [None]
    needed = [
        field.name
        for field in dataclasses.fields(item_class)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for item in items:
        if not isinstance(item, Mapping):
            example = ", ".join(f'"{each}": ...' for each in needed)
            words = "".join(f"{word}, " for word in getattr(item_class, "WORDS", ()))
            or_list = f"one of {words}or a list" if words else "a list"
            raise ConfigError(f"{name}{place} must be {or_list} as [{{{example}}}], got {value}")
        for key in item:
            if _type_of(item_class, str(key)) is None:
                raise _unknown(item_class, str(key), section=f"{name}.", place=place)
        missing = [each for each in needed if each not in item]
        if missing:
            raise ConfigError(f"{name}{place}: {dict(item)} lacks its {' and '.join(missing)}")


def _merge(config_class: type, into: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Lay `settings` over `into`: sections merge, every other value replaces."""
    hints = typing.get_type_hints(config_class)
    for name, value in settings.items():
        kind = without_none(hints[name])
        inner = section_class(kind)
        if inner is not None and isinstance(value, Mapping):
            below = into.get(name)
            into[name] = below if isinstance(below, dict) else {}
            _merge(inner, into[name], value)
        elif (item := items_class(kind)) and (found := list_of_word(item, value)) is not None:
            into[name] = found
        elif typing.get_origin(kind) is tuple and isinstance(value, str | int | float):
            into[name] = items_of(kind, [value]) if isinstance(value, str) else [value]
        else:
            into[name] = value


def _instantiate(config_class: type[C], values: Namespace, path: str) -> C:
    """The dataclass; a ConfigError names the setting by its full dotted path."""
    hints = typing.get_type_hints(config_class)
    arguments: dict[str, Any] = {}
    for field in fields_of(config_class):
        value = values[field.name]
        inner = section_class(hints[field.name])
        if inner is not None and isinstance(value, Namespace):
            value = _instantiate(inner, value, f"{path}{field.name}.")
        elif (item := items_class(hints[field.name])) is not None and value is not None:
            value = tuple(_item(item, each, f"{path}{field.name}.") for each in value)
        elif value is None and without_none(hints[field.name]) is hints[field.name]:
            # jsonargparse takes null for "not given", whatever the type.
            raise ConfigError(f"{path}{field.name} can't be null")
        arguments[field.name] = value
    try:
        return config_class(**arguments)
    except ConfigError as error:
        raise ConfigError(_with_path(str(error), path, list(arguments))) from None


def _item(item_class: type[C], given: Any, path: str) -> C:  # noqa: ANN401
    """One of a list of dataclasses; what isn't given has the default of its class."""
    if not isinstance(given, Namespace):
        return given
    settings = given.as_dict()
    layer = Layer(settings, "the list")
    return build_config(item_class, [layer], section=f"{path}{settings.get('name', '')}.")


def _with_path(sentence: str, path: str, names: Sequence[str]) -> str:
    """`sentence` with its first word, a setting's name, spelled with the full path.

    "optim.lr must be ..." raised inside `actor.optim` becomes "actor.optim.lr must be ...".
    """
    own = path.rstrip(".").rpartition(".")[2]
    first = re.split(r"[^\w.]", sentence, maxsplit=1)[0]
    name = first.removeprefix(f"{own}.") if own else first
    if name.split(".")[0] in names:
        return path + name + sentence[len(first) :]
    return sentence


def _with_file(
    sentence: str, layers: Sequence[Layer], overrides: Sequence[Option], section: str
) -> str:
    """`sentence`, whose first word is a setting, with the file that has the setting's value.

    "sft.epochs must be ..." becomes "sft.epochs in my.yaml must be ..."; what the command line
    given last stays as it is.
    """
    spelled = re.split(r"[^\w.]", sentence, maxsplit=1)[0]
    name = spelled.removeprefix(section)
    if not name or any(given == name or given.startswith(f"{name}.") for given, _ in overrides):
        return sentence
    last = next((layer for layer in reversed(layers) if _says(layer.settings, name)), None)
    if last is None or not last.is_file:
        return sentence
    return f"{spelled} in {last.origin}{sentence[len(spelled) :]}"


def _says(settings: Mapping[str, Any], name: str) -> bool:
    """Whether the setting of this dotted name, or something in it, is among nested settings."""
    head, _, rest = name.partition(".")
    if head not in settings or not rest:
        return head in settings
    below = settings[head]
    return _says(below, rest) if isinstance(below, Mapping) else True


def _unknown(config_class: type, name: str, *, section: str, place: str) -> ConfigError:
    """The error for a name that is not a setting, with the likely meant ones."""
    settings = list(list_settings(config_class))
    meant = " or ".join(section + match for match in did_you_mean(settings, name))
    hint = hint_for_step(name, {each.name for each in settings}, section)
    hint = hint or (f"did you mean {meant}?" if meant else "--help lists the settings")
    return ConfigError(f"there is no setting {section}{name}{place}; {hint}")
