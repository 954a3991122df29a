"""Build dataclasses of settings from files and dotted options, with clear errors.

A name such as `actor.optim.lr` is a path through nested dataclasses. Layers and options are merged
into one nested dictionary, whose types pydantic checks; the dataclasses check ranges and
contradictions themselves. Each error is one sentence that starts with the setting's full name.
Files are YAML (or JSON, which is YAML); a duplicate name in a section is an error.
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
    expand_keyword,
    get_default,
    items_class,
    list_fields,
    list_kinds,
    list_settings,
    section_class,
    unflatten,
    without_none,
)
from pipeline.system.errors import ConfigError, require

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class Layer:
    """Settings from one source, nested like the dataclass; later layers override earlier ones."""

    settings: Mapping[str, Any]

    origin: str
    """Source of the settings, for error messages."""

    is_file: bool = False
    """Whether `origin` is a file that the user can fix."""


def build_config(
    config_class: type[ConfigT],
    layers: Sequence[Layer],
    overrides: Sequence[Option] = (),
    *,
    section: str = "",
) -> ConfigT:
    """Build an instance of the dataclass `config_class`, with types and ranges checked.

    The settings of `layers` are in order of increasing precedence; `overrides`, dotted names with
    values from the command line, override them. In messages, names begin with `section`, such as
    "sft.".

    Raises:
        ConfigError: a setting is unknown, of the wrong type, out of range or contradictory.
    """
    merged = merge(config_class, layers, overrides, section=section)
    try:
        return _adapter(config_class).validate_python(merged)
    except ValidationError as error:
        message = _format_error(error, config_class, section)
        raise ConfigError(_add_file(message, layers, overrides, section)) from None


def method_layer(
    config_class: type, layers: Sequence[Layer], overrides: Sequence[Option] = ()
) -> Layer:
    """Return the `METHODS` entry that the setting `method` names, or an empty one if not set.

    An unknown name gives an empty layer, and an error when the settings are built.
    """
    methods = [layer.settings["method"] for layer in layers if "method" in layer.settings]
    methods += [arguments[0] for name, arguments in overrides if name == "method" and arguments]
    name = str(methods[-1]) if methods else ""
    return Layer(getattr(config_class, "METHODS", {}).get(name, {}), f"the method {name}")


def merge(
    config_class: type,
    layers: Sequence[Layer],
    overrides: Sequence[Option] = (),
    *,
    section: str = "",
) -> dict[str, Any]:
    """Merge layers and options into one nested dictionary, section by section; later values win.

    Raises:
        ConfigError: a setting is unknown or its value can't be parsed.
    """

    def apply(
        outer: type, target: dict[str, Any], settings: Mapping[str, Any], prefix: str, source: str
    ) -> None:
        for key, value in settings.items():
            name, kind = f"{prefix}{key}", list_kinds(outer).get(key)
            if kind is None:
                raise _unknown_setting(config_class, name, section=section, source=source)
            nested = section_class(kind)
            if nested is not None and isinstance(value, Mapping):
                current = target[key] if key in target else get_default(outer, key)
                target[key] = _section_values(current)
                apply(nested, target[key], value, f"{name}.", source)
                continue
            require(
                nested is None or is_dataclass(value) or (value is None and nested is not kind),
                f"{section}{name}{source} must be a mapping of settings, got {value}",
            )
            target[key] = _normalize_value(kind, value, section + name, source)

    merged: dict[str, Any] = {}
    for layer in layers:
        apply(config_class, merged, layer.settings, "", f" in {layer.origin}")
    for name, arguments in overrides:
        if get_type(config_class, name) is None:
            raise _unknown_setting(config_class, name, section=section, source="")
        value = _parse_arguments(get_type(config_class, name), arguments, f"--{section}{name}")
        head, _, key = name.rpartition(".")
        settings = {name: value}
        if head and typing.get_origin(get_type(config_class, head)) is dict:
            entries = _get_value(config_class, merged, head) or {}
            require(isinstance(entries, dict), f"{section}{head} must be a mapping, got {entries}")
            settings = {head: {**entries, key: value}}
        apply(config_class, merged, unflatten(settings), "", "")
    return merged


def get_type(config_class: type, name: str) -> object:
    """Return the type of the setting `name`, or None if there is no such setting."""
    head, _, rest = name.partition(".")
    kind = list_kinds(config_class).get(head)
    if kind is None or not rest:
        return kind
    inner = section_class(kind)
    if inner is not None:
        return get_type(inner, rest)
    # A mapping entry, such as data.fields.prompt.
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else None


_adapter = functools.cache(TypeAdapter)
_NOT_FINITE = re.compile(r"[+-]?(inf|infinity|nan)", re.IGNORECASE)


def _section_values(value: object) -> dict[str, Any]:
    """Return the values of a section as a dictionary."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in list_fields(type(value))}
    return value if isinstance(value, dict) else {}


def _get_value(config_class: type, merged: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    """Return the value of a setting in the merged layers, or else its default."""
    head, _, rest = name.partition(".")
    value = merged[head] if head in merged else get_default(config_class, head)
    inner = section_class(list_kinds(config_class)[head])
    return value if not rest or inner is None else _get_value(inner, _section_values(value), rest)


def _normalize_value(kind: object, value: object, name: str, source: str) -> object:
    """Convert a value to its setting's type: an item to a list, a date to text, `~/` to a path.

    Raises:
        ConfigError: a number is infinite, NaN or given as a boolean; YAML reads yes, no, on and off
            as booleans.
    """
    item_class = items_class(kind)
    choices = typing.get_args(without_none(kind)) or (without_none(kind),)
    if float in choices and _NOT_FINITE.fullmatch(str(value)):
        raise ConfigError(f"{name}{source} must be a finite number, got {value}")
    if isinstance(value, bool):
        types = {choice if isinstance(choice, type) else type(choice) for choice in choices}
        if not value and "off" in choices:
            return "off"
        require(
            bool in types or not types & {int, float},
            f"{name}{source} must be a number, got {value}",
        )
    if item_class is not None and value is not None:
        preset = expand_keyword(item_class, value)
        return _check_items(item_class, value, name, source) if preset is None else preset
    if typing.get_origin(without_none(kind)) is tuple and isinstance(value, str | int | float):
        return _parse_list(without_none(kind), [value]) if isinstance(value, str) else [value]
    if without_none(kind) is Path and isinstance(value, str) and value.startswith("~"):
        return Path(value).expanduser()
    if typing.get_origin(without_none(kind)) is typing.Literal and isinstance(value, str):
        return {str(choice): choice for choice in choices}.get(value, value)
    return str(value) if isinstance(value, date) else value


def _check_items(item_class: type, value: object, name: str, source: str) -> object:
    """Check the names in `value`, a list of settings of `item_class`, and return the list."""
    for item in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(item, Mapping) and not is_dataclass(item):
            keywords = "".join(f"{keyword}, " for keyword in getattr(item_class, "PRESETS", ()))
            or_list = f"one of {keywords}or a list" if keywords else "a list"
            example = f'[{{"{list_fields(item_class)[0].name}": ...}}]'
            raise ConfigError(f"{name}{source} must be {or_list} such as {example}, got {value}")
        for key in item if isinstance(item, Mapping) else ():
            if get_type(item_class, str(key)) is None:
                raise _unknown_setting(item_class, str(key), section=f"{name}.", source=source)
    return value


def _parse_arguments(kind: object, arguments: list[str], option: str) -> object:
    """Convert the arguments of an option to the setting's type if possible."""
    kind = without_none(kind)
    origin, type_args = typing.get_origin(kind), typing.get_args(kind)
    is_list_of_texts = origin is tuple and type_args[0] is str
    opening = [] if kind is str else ["["] if is_list_of_texts else ["[", "{"]
    if arguments == ["null"]:
        return None
    if len(arguments) == 1 and arguments[0][:1] in opening:
        return _parse_yaml(arguments[0])
    if origin is dict and arguments and all("=" in argument for argument in arguments):
        pairs = dict(argument.split("=", 1) for argument in arguments)
        has_texts = type_args[1] is str
        return pairs if has_texts else {name: _parse_yaml(text) for name, text in pairs.items()}
    if section_class(kind) is not None:
        require(not arguments, f"{option} is a section: set {option}.NAME VALUE instead")
        return {}
    if origin is tuple:
        require(bool(arguments), f"{option} takes at least one value, got none")
        return arguments[0] if items_class(kind) is not None else _parse_list(kind, arguments)
    return True if kind is bool and not arguments else _parse_scalar(kind, arguments, option)


def _parse_scalar(kind: object, arguments: list[str], option: str) -> object:
    """Convert the single argument of an option."""
    if len(arguments) != 1:
        got = f"got {len(arguments)}: {' '.join(arguments)}" if arguments else "got none"
        raise ConfigError(f"{option} takes one value, {got}")
    (text,) = arguments
    # save_every accepts 100 or 2h; an untyped mapping accepts true, 3 or a word.
    return _parse_yaml(text) if int in typing.get_args(kind) or kind in (object, Any) else text


def _parse_yaml(text: str) -> object:
    """Parse JSON, or YAML as in settings files; return other text unchanged."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _parse_list(kind: object, arguments: Sequence[str]) -> list[Any]:
    """Convert the items of a list setting; numbers may be separated by commas: "2,4,4"."""
    first = typing.get_args(kind)[0]
    if first is str:
        return list(arguments)
    items = [item for item in ",".join(arguments).split(",") if item]
    choices = {str(choice): choice for choice in typing.get_args(first)}
    return [choices.get(item, item) for item in items]


def _format_error(error: ValidationError, config_class: type, section: str) -> str:
    """Format the first error as a sentence that starts with the setting's full name.

    Raises:
        Exception: the dataclass raised an error that is not about a setting.
    """
    first = error.errors()[0]
    kind: object = config_class
    name = section.removesuffix(".")
    for part in first["loc"]:
        type_args, inner = typing.get_args(without_none(kind)), section_class(kind)
        if isinstance(part, int) and type_args and first["type"] != "missing":
            kind = type_args[0] if type_args[-1] is ... else type_args[part]
        elif isinstance(part, int) and (item := items_class(kind)) is not None:
            kind = item
        elif inner is not None and part in list_kinds(inner):
            name, kind = f"{name}.{part}".lstrip("."), list_kinds(inner)[str(part)]
    cause, inner = first.get("ctx", {}).get("error"), section_class(kind)
    if cause is not None and not isinstance(cause, ConfigError):
        raise cause
    if cause is not None and inner is not None:
        return _expand_name(str(cause), f"{name}." if name else "", list_kinds(inner))
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        item, _, needed = name.rpartition(".")
        return f"{item}: {first['input']} lacks its {needed}"
    return _format_type_error(name, kind, first["input"])


def _format_type_error(name: str, kind: object, value: object) -> str:
    formatted = "null" if value is None else "nothing" if value == "" else value
    if isinstance(value, list | tuple):
        formatted = f"[{', '.join(map(str, value))}]"
    return f"{name} must be {_describe_type(kind)}, got {formatted}"


_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping of names to values",
    NoneType: "null",
    Path: "a path",
}


def _describe_type(kind: object) -> str:
    """Describe a type for error messages."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return " or ".join(map(_describe_type, arguments))
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple:
        return "a list" if arguments[-1] is ... else f"a list of {len(arguments)} values"
    if section_class(kind) is not None:
        return "a mapping of settings"
    return _TYPE_NAMES.get(typing.cast("type", origin or kind), str(kind))


def _expand_name(message: str, path: str, names: Mapping[str, object]) -> str:
    """Expand the first word of `message`, a setting's name, to the full path.

    "optim.lr must be ..." raised inside `actor.optim` becomes "actor.optim.lr must be ...".
    """
    section = path.rstrip(".").rpartition(".")[2]
    first = re.split(r"[^\w.]", message, maxsplit=1)[0]
    name = first.removeprefix(f"{section}.") if section else first
    return path + name + message[len(first) :] if name.split(".")[0] in names else message


def _add_file(
    message: str, layers: Sequence[Layer], overrides: Sequence[Option], section: str
) -> str:
    """Insert the file that sets the value into `message`, whose first word is the setting.

    "sft.epochs must be ..." becomes "sft.epochs in my.yaml must be ..."; if no file sets the value,
    it is unchanged.
    """
    full_name = re.split(r"[^\w.]", message, maxsplit=1)[0]
    name = full_name.removeprefix(section)
    overridden = (override for override, _ in overrides)
    if not name or any(other == name or other.startswith(f"{name}.") for other in overridden):
        return message
    last = next((layer for layer in reversed(layers) if _contains(layer.settings, name)), None)
    if last is None or not last.is_file:
        return message
    return f"{full_name} in {last.origin}{message[len(full_name) :]}"


def _contains(settings: Mapping[str, Any], name: str) -> bool:
    """Return whether the settings contain this dotted name, or a value in place of its section."""
    head, _, rest = name.partition(".")
    if head not in settings or not rest:
        return head in settings
    inner = settings[head]
    return _contains(inner, rest) if isinstance(inner, Mapping) else True


def _unknown_setting(config_class: type, name: str, *, section: str, source: str) -> ConfigError:
    """Return the error for an unknown setting, with suggestions."""
    settings = list(list_settings(config_class))
    suggestion = did_you_mean(settings, name, lambda known: section + known, what="settings")
    if any(setting.name == name for setting in settings):
        suggestion = "nest the sections, as in {model: {path: DIR}}"
    hint = deepspeed_chat_hint(name) or suggestion
    return ConfigError(f"there is no setting {section}{name}{source}; {hint}")


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
            mapping of names to values; the message names the file and, if known, the line.
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
            f"--config {path} is not UTF-8 text at line {line}; save the file as UTF-8"
        ) from None
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        location = "" if mark is None else f" at line {mark.line + 1}"
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not valid YAML{location}: {problem}") from None
    except RecursionError:
        raise ConfigError(f"--config {path} is nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"--config {path} {error}") from None
    except ValueError as error:  # such as the date 2026-99-99
        raise ConfigError(f"--config {path} has a value that can't be read: {error}") from None
    if not isinstance(settings or {}, dict):
        raise ConfigError(f"--config {path} must be a mapping, `name: value`, got {settings}")
    return Layer(settings or {}, str(path), is_file=True)
