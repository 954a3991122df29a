"""Dataclasses of settings built from nested mappings and dotted options, with clear errors.

A name such as `actor.optim.lr` is a path through nested dataclasses. Types are checked by
jsonargparse, ranges and contradictions by the dataclasses themselves; whatever fails, the message
is one sentence that starts with the setting's full name.
"""

import dataclasses
import difflib
import functools
import json
import re
import types
import typing
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import docstring_parser
import yaml
from jsonargparse import ArgumentParser, Namespace

from pipeline.errors import ConfigError

C = TypeVar("C")

Option = tuple[str, list[str]]
"""A name without its dashes, and the words that follow it: ("data.path", ["a", "b"])."""


@dataclass(frozen=True)
class Layer:
    """Settings from one place, nested as in the dataclass; later layers win."""

    settings: Mapping[str, Any]

    origin: str
    """Where they came from, for error messages."""

    is_file: bool = False
    """Whether `origin` is a file that a user can mend."""


@dataclass(frozen=True)
class Setting:
    """One leaf of a dataclass of settings."""

    name: str
    """Dotted: `model.optim.lr`."""

    kind: object
    """Its type."""

    default: object

    description: str


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
    for name, words in overrides:
        kind = _type_of(config_class, name)
        if kind is None:
            raise _unknown(config_class, name, section=section, place="")
        arguments.append(f"--{name}={_as_word(f'--{section}{name}', kind, words)}")
    try:
        return _parser(config_class).parse_args(arguments)
    except ArgumentError as error:
        sentence = _one_sentence(str(error), section)
        raise ConfigError(_with_file(sentence, layers, overrides, section)) from None


def list_settings(
    config_class: type, prefix: str = "", instance: object = None
) -> Iterator[Setting]:
    """All settings of a dataclass, in the order of its definition.

    Defaults are read from `instance` where one is given: a section's default may differ from what
    the section's class says.
    """
    hints = typing.get_type_hints(config_class)
    descriptions = _descriptions(config_class)
    for field in dataclasses.fields(config_class):
        name, kind = prefix + field.name, hints[field.name]
        default = _default(field) if instance is None else getattr(instance, field.name)
        inner = section_class(kind)
        if inner is not kind:
            yield Setting(name, kind, default, descriptions.get(field.name, ""))
        if inner is not None:
            yield from list_settings(inner, f"{name}.", default)


def section_descriptions(config_class: type) -> Iterator[tuple[str, str]]:
    """The sections of a dataclass of settings, with what each is about.

    A section without a docstring of its own has that of its class.
    """
    descriptions = _descriptions(config_class)
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        inner = section_class(hints[field.name])
        if inner is not None:
            summary = (inner.__doc__ or "").strip().splitlines()[0]
            yield field.name, descriptions.get(field.name) or summary


def plain(value: object) -> Any:  # noqa: ANN401
    """Dataclasses, tuples and paths as the mappings, lists and strings that YAML has."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
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
    usual = flatten(plain(type(config)()))
    options: list[Option] = []
    for name, value in flatten(plain(config)).items():
        if name in usual and usual[name] == value:
            continue
        kind = without_none(hints.get(name))
        if value is None or isinstance(value, bool):
            words = [json.dumps(value)]
        elif _are_words(value) and typing.get_args(kind)[:1] == (str,):
            words = list(value)
        elif isinstance(value, list | dict):
            words = [json.dumps(value)]
        else:
            words = [str(value)]
        options.append((name, words))
    return options


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


def portable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A step's settings by dotted name, with paths beside its directory written relative to it.

    So a run that was moved, or is now named by another path, is still the same run.
    """
    root = Path(str(settings.get("output_dir", ""))).parent

    def relative(name: str, value: object) -> object:
        inside = name.endswith(".path") and isinstance(value, str) and Path(value).parent == root
        return f"OUT/{Path(str(value)).name}" if inside else value

    flat = flatten(settings)
    flat.pop("output_dir", None)
    return {name: relative(name, value) for name, value in flat.items()}


def did_you_mean(settings: Sequence[Setting], name: str) -> list[str]:
    """Up to two settings with the same last word, or of that name elsewhere, or a close one."""
    names = [setting.name for setting in settings]
    last = name.rpartition(".")[2]
    ends = {known.rpartition(".")[2]: known for known in reversed(names)}
    candidates = (
        [known for known in names if known.rpartition(".")[2] == last],
        # Descriptions give other systems' word for a setting in parentheses: (learning_rate).
        [setting.name for setting in settings if f"({last})" in setting.description],
        difflib.get_close_matches(name, names, n=1, cutoff=0.75),
        [ends[end] for end in difflib.get_close_matches(last, ends, n=1, cutoff=0.75)],
    )
    return next((found for found in candidates if found), [])[:2]


def section_class(kind: object) -> type | None:
    """The dataclass in `kind`, which may be `SomeConfig` or `SomeConfig | None`."""
    kind = without_none(kind)
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def without_none(kind: object) -> object:
    """`X` for `X | None`; every other type as it is."""
    parts = typing.get_args(kind)
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    if not is_union or types.NoneType not in parts:
        return kind
    return typing.Union[tuple(part for part in parts if part is not types.NoneType)]  # noqa: UP007


@functools.cache
def _parser(config_class: type) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, default_env=False, add_help=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(config_class)
    return parser


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@functools.cache
def _descriptions(config_class: type) -> dict[str, str]:
    """Field name to the docstring below it, base classes first."""
    return {
        parameter.arg_name: " ".join((parameter.description or "").split())
        for base in reversed(config_class.__mro__[:-1])
        for parameter in docstring_parser.parse_from_object(base).params
    }


def _type_of(config_class: type, name: str) -> object:
    """The type of the setting `name`; None where there is no such setting."""
    head, _, rest = name.partition(".")
    kind = typing.get_type_hints(config_class).get(head)
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
            if section_class(kind) is None:
                continue
            if isinstance(value, Mapping):
                walk(value, name + ".")
            elif value is not None or section_class(kind) is kind:
                raise ConfigError(f"{section}{name} in {layer.origin} holds no settings: {value}")

    walk(layer.settings, "")


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
        elif typing.get_origin(kind) is tuple and isinstance(value, str | int | float):
            into[name] = _items(kind, [value]) if isinstance(value, str) else [value]
        else:
            into[name] = value


def _instantiate(config_class: type[C], values: Namespace, path: str) -> C:
    """The dataclass; a ConfigError names the setting by its full dotted path."""
    hints = typing.get_type_hints(config_class)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):  # pyright: ignore[reportArgumentType]
        value = values[field.name]
        inner = section_class(hints[field.name])
        if inner is not None and isinstance(value, Namespace):
            value = _instantiate(inner, value, f"{path}{field.name}.")
        elif value is None and without_none(hints[field.name]) is hints[field.name]:
            # jsonargparse takes null for "not given", whatever the type.
            raise ConfigError(f"{path}{field.name} can't be null")
        arguments[field.name] = value
    try:
        return config_class(**arguments)
    except ConfigError as error:
        raise ConfigError(_with_path(str(error), path, list(arguments))) from None


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
    said last stays as it is.
    """
    spelled = re.split(r"[^\w.]", sentence, maxsplit=1)[0]
    name = spelled.removeprefix(section)
    if not name or any(said == name or said.startswith(f"{name}.") for said, _ in overrides):
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


def _as_word(option: str, kind: object, words: list[str]) -> str:
    """The words after an option as the one word that jsonargparse reads."""
    kind = without_none(kind)
    is_json = len(words) == 1 and words[0][:1] in ("[", "{")
    if is_json or words == ["null"]:
        return words[0]
    if typing.get_origin(kind) is tuple:
        if not words:
            raise ConfigError(f"{option} takes at least one value, got none")
        return json.dumps(_items(kind, words))
    if typing.get_origin(kind) is dict and words and all("=" in word for word in words):
        return json.dumps(dict(word.split("=", 1) for word in words))
    if not words and kind is bool:
        return "true"
    if section_class(kind) is not None:
        if words:
            raise ConfigError(f"{option} holds settings: set them one by one, {option}.NAME VALUE")
        return "{}"
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise ConfigError(f"{option} takes one value, {got}")
    return words[0]


def _items(kind: object, words: list[str]) -> list[str]:
    """The items of a list setting; numbers may be joined by commas: "2,4,4"."""
    if str in typing.get_args(kind):
        return words
    return [item for item in ",".join(words).split(",") if item]


def _unknown(config_class: type, name: str, *, section: str, place: str) -> ConfigError:
    """The error for a name that is no setting, with the likely meant ones."""
    matches = did_you_mean(list(list_settings(config_class)), name)
    meant = " or ".join(section + match for match in matches)
    hint = f"did you mean {meant}?" if meant else "--help lists the settings"
    return ConfigError(f"there is no setting {section}{name}{place}; {hint}")


def _one_sentence(message: str, section: str) -> str:
    """The parser's multi-line message as one sentence that names the setting."""
    names = re.findall(r'Parser key "([^"]+)":', message)
    if not names:
        return " ".join(message.split())
    problem = message.rpartition(f'Parser key "{names[-1]}":')[2]
    if len(names) > 1:  # inside an optional section: drop the alternative, null
        problem = problem.split("\n    -")[0]
    name = section + ".".join(names)
    expected = re.findall(r"Expected (?:an? )?(.+?)(?=\. Got value|$)", problem, re.MULTILINE)
    got = re.search(r"(?:Got|Given) value: (.+)", problem)
    if not expected or not got:
        return f"{name}: {' '.join(problem.split())}"
    kinds = " or ".join(_in_words(kind) for kind in expected)
    value = got[1].strip()
    return f"{name} must be {kinds}, got {'null' if value == 'None' else value}"


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "tuple": "a list",
    "dict": "a mapping of names to values",
    "NoneType": "null",
    "Path": "a path",
}


def _in_words(kind: str) -> str:
    """A type as jsonargparse prints it, in plain words."""
    if choices := re.fullmatch(r"(?:typing\.)?Literal\[(.*)\]", kind):
        return "one of " + choices[1]
    if length := re.fullmatch(r"tuple with (\d+) elements", kind):
        return f"a list of {length[1]}"
    name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind).strip()
    return _WORDS.get(name, name)
