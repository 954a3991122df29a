"""Dataclasses of settings built from files and dotted options, with clear errors.

A name such as `actor.optim.lr` is a path through nested dataclasses. Layers and options are merged
into one nested dictionary, whose types pydantic checks; the dataclasses check ranges and
contradictions themselves. Each error is one sentence that starts with the setting's full name.
Files are YAML (or JSON, which is YAML); a name twice in one section is refused.
"""

import functools
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from pipeline.settings.deepspeed_chat import deepspeed_chat_hint
from pipeline.settings.fields import (
    Option,
    did_you_mean,
    get_default,
    items_class,
    list_fields,
    list_kinds,
    list_of_word,
    list_settings,
    nested,
    section_class,
    without_none,
)
from pipeline.system.errors import ConfigError, require

C = TypeVar("C")


@dataclass(frozen=True)
class Layer:
    """Settings from one source, nested like the dataclass; later layers win."""

    settings: Mapping[str, Any]

    origin: str
    """Source of the settings, for error messages."""

    is_file: bool = False
    """Whether `origin` is a file that the user can fix."""


def build_config(
    config_class: type[C],
    layers: Sequence[Layer],
    overrides: Sequence[Option] = (),
    *,
    section: str = "",
) -> C:
    """Build an instance of the dataclass `config_class`, with types and ranges checked.

    Args:
        config_class: a frozen dataclass; its fields may be dataclasses.
        layers: settings in order of increasing precedence.
        overrides: dotted names and their values from the command line; these win.
        section: the prefix of names in messages, such as "sft.".

    Raises:
        ConfigError: a setting is unknown, of the wrong type, out of range or contradictory.
    """
    merged = merge(config_class, layers, overrides, section=section)
    try:
        return _adapter(config_class).validate_python(merged)
    except ValidationError as error:
        sentence = _sentence(error, config_class, section)
        raise ConfigError(_with_file(sentence, layers, overrides, section)) from None


def method_layer(
    config_class: type, layers: Sequence[Layer], overrides: Sequence[Option] = ()
) -> Layer:
    """The row of a dataclass's `METHODS` that the setting `method` names; empty without a name.

    An unknown name gives an empty layer, and an error when the settings are built.
    """
    named = [layer.settings["method"] for layer in layers if "method" in layer.settings]
    named += [words[0] for name, words in overrides if name == "method" and words]
    name = str(named[-1]) if named else ""
    return Layer(getattr(config_class, "METHODS", {}).get(name, {}), f"the method {name}")


def merge(
    config_class: type,
    layers: Sequence[Layer],
    overrides: Sequence[Option] = (),
    *,
    section: str = "",
) -> dict[str, Any]:
    """Merge layers and options into one nested dictionary; sections merge, other values replace.

    Raises:
        ConfigError: a setting is unknown or its value can't be parsed.
    """

    def lay(
        inner: type, into: dict[str, Any], settings: Mapping[str, Any], prefix: str, place: str
    ) -> None:
        for key, value in settings.items():
            name, kind = f"{prefix}{key}", list_kinds(inner).get(key)
            if kind is None:
                raise _unknown(config_class, name, section=section, place=place)
            below = section_class(kind)
            if below is not None and isinstance(value, Mapping):
                into[key] = _opened(into[key] if key in into else get_default(inner, key))
                lay(below, into[key], value, f"{name}.", place)
                continue
            require(
                below is None or is_dataclass(value) or (value is None and below is not kind),
                f"{section}{name}{place} must be a mapping of settings, got {value}",
            )
            into[key] = _normalized(kind, value, section + name, place)

    merged: dict[str, Any] = {}
    for layer in layers:
        lay(config_class, merged, layer.settings, "", f" in {layer.origin}")
    for name, words in overrides:
        if get_type(config_class, name) is None:
            raise _unknown(config_class, name, section=section, place="")
        value = _value_of_words(get_type(config_class, name), words, f"--{section}{name}")
        head, _, key = name.rpartition(".")
        given = {name: value}
        if head and typing.get_origin(get_type(config_class, head)) is dict:
            given = {head: {**_value_in(config_class, merged, head), key: value}}
        lay(config_class, merged, nested(given), "", "")
    return merged


def get_type(config_class: type, name: str) -> object:
    """The type of the setting `name`; None if there is no such setting."""
    head, _, rest = name.partition(".")
    kind = list_kinds(config_class).get(head)
    if kind is None or not rest:
        return kind
    inner = section_class(kind)
    if inner is not None:
        return get_type(inner, rest)
    # A mapping entry, such as data.fields.prompt.
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401
    return TypeAdapter(kind)


def _opened(value: object) -> dict[str, Any]:
    """A section as a dictionary."""
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in list_fields(type(value))}
    return value if isinstance(value, dict) else {}


def _value_in(config_class: type, merged: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    """The value of a setting in the merged layers, or else its default."""
    head, _, rest = name.partition(".")
    value = merged[head] if head in merged else get_default(config_class, head)
    inner = section_class(list_kinds(config_class)[head])
    return value if not rest or inner is None else _value_in(inner, _opened(value), rest)


def _normalized(kind: object, value: object, name: str, place: str) -> object:
    """A value from a file converted to its type: one item to a list, a date to text."""
    item = items_class(kind)
    if item is not None and value is not None:
        found = list_of_word(item, value)
        return _checked_items(item, value, name, place) if found is None else found
    if typing.get_origin(without_none(kind)) is tuple and isinstance(value, str | int | float):
        return _items(without_none(kind), [value]) if isinstance(value, str) else [value]
    return str(value) if isinstance(value, date) else value


def _checked_items(item_class: type, value: object, name: str, place: str) -> object:
    """Check the names in `value`, a list of settings of `item_class`, and return it."""
    for item in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(item, Mapping) and not is_dataclass(item):
            words = "".join(f"{word}, " for word in getattr(item_class, "WORDS", ()))
            or_list = f"one of {words}or a list" if words else "a list"
            example = f'[{{"{list_fields(item_class)[0].name}": ...}}]'
            raise ConfigError(f"{name}{place} must be {or_list} as {example}, got {value}")
        for key in item if isinstance(item, Mapping) else ():
            if get_type(item_class, str(key)) is None:
                raise _unknown(item_class, str(key), section=f"{name}.", place=place)
    return value


def _value_of_words(kind: object, words: list[str], option: str) -> object:
    """The arguments of an option, converted to the setting's type if possible."""
    kind = without_none(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    is_text = origin is tuple and arguments[0] is str
    if words == ["null"]:
        return None
    if len(words) == 1 and words[0][:1] in (("[",) if is_text else ("[", "{")):
        return _from_yaml(words[0])
    if origin is dict and words and all("=" in word for word in words):
        pairs = dict(word.split("=", 1) for word in words)
        is_text = arguments[1] is str
        return pairs if is_text else {name: _from_yaml(word) for name, word in pairs.items()}
    if section_class(kind) is not None:
        require(not words, f"{option} is a section: set {option}.NAME VALUE instead")
        return {}
    if origin is tuple:
        require(bool(words), f"{option} takes at least one value, got none")
        return words[0] if items_class(kind) is not None else _items(kind, words)
    return True if kind is bool and not words else _one_value(kind, words, option)


def _one_value(kind: object, words: list[str], option: str) -> object:
    """The value of an option's single argument."""
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise ConfigError(f"{option} takes one value, {got}")
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return {str(choice): choice for choice in arguments}.get(words[0], words[0])
    # save_every accepts 100 or 2h; an untyped mapping accepts true, 3 or a word.
    return _from_yaml(words[0]) if int in arguments or kind in (object, Any) else words[0]


def _from_yaml(text: str) -> object:
    """The value of JSON, or YAML as in settings files; otherwise the text itself."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _items(kind: object, words: Sequence[str]) -> list[Any]:
    """The items of a list setting; numbers may be separated by commas: "2,4,4"."""
    first = typing.get_args(kind)[0]
    if first is str:
        return list(words)
    items = [item for item in ",".join(words).split(",") if item]
    choices = {str(choice): choice for choice in typing.get_args(first)}
    return [choices.get(item, item) for item in items]


def _sentence(error: ValidationError, config_class: type, section: str) -> str:
    """The first error as a sentence that starts with the setting's full name.

    Raises:
        Exception: the dataclass raised an error that is not about a setting.
    """
    first = error.errors()[0]
    kind: object = config_class
    name = section.removesuffix(".")
    for part in first["loc"]:
        items, inner = typing.get_args(without_none(kind)), section_class(kind)
        if isinstance(part, int) and items and first["type"] != "missing":
            kind = items[0] if items[-1] is ... else items[part]
        elif isinstance(part, int) and (item := items_class(kind)) is not None:
            kind = item
        elif inner is not None and part in list_kinds(inner):
            name, kind = f"{name}.{part}".lstrip("."), list_kinds(inner)[str(part)]
    cause, inner = first.get("ctx", {}).get("error"), section_class(kind)
    if cause is not None and not isinstance(cause, ConfigError):
        raise cause
    if cause is not None and inner is not None:
        return _with_path(str(cause), f"{name}." if name else "", list_kinds(inner))
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        item, _, needed = name.rpartition(".")
        return f"{item}: {first['input']} lacks its {needed}"
    return _wrong_type(name, kind, first["input"])


def _wrong_type(name: str, kind: object, value: object) -> str:
    shown = "null" if value is None else "nothing" if value == "" else value
    if isinstance(value, list | tuple):
        shown = f"[{', '.join(map(str, value))}]"
    return f"{name} must be {_in_words(kind)}, got {shown}"


_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping of names to values",
    NoneType: "null",
    Path: "a path",
}


def _in_words(kind: object) -> str:
    """A type in plain words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return " or ".join(map(_in_words, arguments))
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple:
        return "a list" if arguments[-1] is ... else f"a list of {len(arguments)} values"
    if section_class(kind) is not None:
        return "settings"
    return _WORDS.get(typing.cast("type", origin or kind), str(kind))


def _with_path(sentence: str, path: str, names: Mapping[str, object]) -> str:
    """`sentence` with its first word, a setting's name, expanded to the full path.

    "optim.lr must be ..." raised inside `actor.optim` becomes "actor.optim.lr must be ...".
    """
    own = path.rstrip(".").rpartition(".")[2]
    first = re.split(r"[^\w.]", sentence, maxsplit=1)[0]
    name = first.removeprefix(f"{own}.") if own else first
    return path + name + sentence[len(first) :] if name.split(".")[0] in names else sentence


def _with_file(
    sentence: str, layers: Sequence[Layer], overrides: Sequence[Option], section: str
) -> str:
    """`sentence`, whose first word is a setting, with the file that has the setting's value.

    "sft.epochs must be ..." becomes "sft.epochs in my.yaml must be ..."; a value from the command
    line changes nothing.
    """
    spelled = re.split(r"[^\w.]", sentence, maxsplit=1)[0]
    name = spelled.removeprefix(section)
    if not name or any(given == name or given.startswith(f"{name}.") for given, _ in overrides):
        return sentence
    last = next((layer for layer in reversed(layers) if _has(layer.settings, name)), None)
    if last is None or not last.is_file:
        return sentence
    return f"{spelled} in {last.origin}{sentence[len(spelled) :]}"


def _has(settings: Mapping[str, Any], name: str) -> bool:
    """Whether the nested settings have this dotted name, or a value in place of its section."""
    head, _, rest = name.partition(".")
    if head not in settings or not rest:
        return head in settings
    below = settings[head]
    return _has(below, rest) if isinstance(below, Mapping) else True


def _unknown(config_class: type, name: str, *, section: str, place: str) -> ConfigError:
    """The error for an unknown setting, with suggestions."""
    settings = list(list_settings(config_class))
    close = did_you_mean(settings, name, lambda known: section + known, what="settings")
    hint = deepspeed_chat_hint(name) or close
    return ConfigError(f"there is no setting {section}{name}{place}; {hint}")


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate names in a section."""

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002
    ) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value != "<<" and key.value in lines:
                raise ConfigError(
                    f"has {key.value} twice, on lines {lines[key.value]} and {line}; keep one of"
                    " them"
                )
            lines[key.value if isinstance(key, yaml.ScalarNode) else ""] = line
        return super().construct_mapping(node, deep)


def read_settings(path: Path) -> Layer:
    """Read the settings in a file, nested as in the file; an empty file has none.

    Raises:
        ConfigError: the file doesn't exist, is not UTF-8 or YAML, has a duplicate name, or is not a
            mapping of names to values; the message names the file and the line, if there is one.
    """
    try:
        settings = yaml.load(path.read_bytes().decode("utf-8-sig"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"--config {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"--config {path} is not UTF-8 text in line {line}; save the file as UTF-8"
        ) from None
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not valid YAML{where}: {problem}") from None
    except RecursionError:
        raise ConfigError(f"--config {path} is nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"--config {path} {error}") from None
    except ValueError as error:  # such as the date 2026-99-99
        raise ConfigError(f"--config {path} has a value that can't be read: {error}") from None
    if not isinstance(settings or {}, dict):
        raise ConfigError(f"--config {path} must contain settings, `name: value`, got {settings}")
    return Layer(settings or {}, str(path), is_file=True)
