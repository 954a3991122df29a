"""Settings of a dataclass: names, types, defaults, descriptions, YAML and options."""

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docstring_parser
import yaml


@dataclass(frozen=True)
class Setting:
    """One leaf of a dataclass of settings."""

    name: str
    """Dotted name: `model.optim.lr`."""

    kind: object
    """Type of the setting."""

    default: object

    description: str


def list_settings(
    config_class: type, prefix: str = "", instance: object = None
) -> Iterator[Setting]:
    """Yield all settings of a dataclass, in order of definition.

    Defaults are read from `instance` if given: a section's default may differ from its class's.
    """
    hints = typing.get_type_hints(config_class)
    descriptions = _descriptions(config_class)
    for field in list_fields(config_class):
        name, kind = prefix + field.name, hints[field.name]
        default = _default(field) if instance is None else getattr(instance, field.name)
        inner = section_class(kind)
        if inner is not kind:
            yield Setting(name, kind, default, descriptions.get(field.name, ""))
        if inner is not None:
            yield from list_settings(inner, f"{name}.", default)


def list_fields(config_class: type) -> list[dataclasses.Field[Any]]:
    """Return the fields that can be set; a class may fix fields of its base (`init=False`)."""
    return [field for field in dataclasses.fields(config_class) if field.init]


@functools.cache
def list_kinds(config_class: type) -> Mapping[str, object]:
    """Return the types, by name, of the fields that can be set."""
    hints = typing.get_type_hints(config_class)
    return {field.name: hints[field.name] for field in list_fields(config_class)}


def get_default(config_class: type, name: str) -> object:
    """Return the default of a field, or None if it has none."""
    default = next(_default(field) for field in list_fields(config_class) if field.name == name)
    return None if default is dataclasses.MISSING else default


def section_descriptions(config_class: type) -> Iterator[tuple[str, str]]:
    """Yield the sections of a dataclass of settings, with their descriptions.

    A section without a docstring gets the first line of its class's docstring.
    """
    descriptions = _descriptions(config_class)
    for name, kind in list_kinds(config_class).items():
        inner = section_class(kind)
        if inner is not None:
            summary = (inner.__doc__ or "").strip().splitlines()[0]
            yield name, descriptions.get(name) or summary


def did_you_mean(
    settings: Sequence[Setting], name: str, spell: Callable[[str], str], *, what: str = "options"
) -> str:
    """Return the end of an error message, which suggests up to two settings with similar names.

    If there are none, it refers to `--help`, which lists `what`. `spell` formats a name.
    """
    names = [setting.name for setting in settings]
    last = name.rpartition(".")[2]
    last_words = {known.rpartition(".")[2]: known for known in reversed(names)}
    candidates = (
        [known for known in names if known.rpartition(".")[2] == last],
        # Descriptions give other systems' names in parentheses: (learning_rate).
        [setting.name for setting in settings if f"({last})" in setting.description],
        difflib.get_close_matches(name, names, n=1, cutoff=0.75),
        [last_words[end] for end in difflib.get_close_matches(last, last_words, n=1, cutoff=0.75)],
    )
    matches = next(filter(None, candidates), [])[:2]
    guess = " or ".join(map(spell, matches))
    return f"did you mean {guess}?" if guess else f"--help lists the {what}"


def section_class(kind: object) -> type | None:
    """Return `X` if the type is a dataclass `X` or `X | None`, else None."""
    kind = without_none(kind)
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def items_class(kind: object) -> type | None:
    """Return `X` if the type is `tuple[X, ...]` of a dataclass `X`, else None."""
    first, *rest = typing.get_args(kind) or (None,)
    is_list = typing.get_origin(kind) is tuple and rest == [...]
    return section_class(first) if is_list else None


def expand_keyword(item_class: type, keyword: object) -> list[Mapping[str, Any]] | None:
    """Return the list for a keyword in the item class's `PRESETS`, or None for other values."""
    presets: Mapping[str, Sequence[Mapping[str, Any]]] = getattr(item_class, "PRESETS", {})
    return list(presets[keyword]) if isinstance(keyword, str) and keyword in presets else None


def without_none(kind: object) -> object:
    """Return `X` for `X | None`; return other types unchanged."""
    parts = typing.get_args(kind)
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    if not is_union or types.NoneType not in parts:
        return kind
    return typing.Union[tuple(part for part in parts if part is not types.NoneType)]  # noqa: UP007  # pyrefly: ignore[invalid-annotation]


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@functools.cache
def _descriptions(config_class: type) -> dict[str, str]:
    """Map each field's name to the docstring below it, base classes first."""
    return {
        parameter.arg_name: " ".join((parameter.description or "").split())
        for base in reversed(config_class.__mro__[:-1])
        for parameter in docstring_parser.parse_from_object(base).params
    }


Option = tuple[str, list[str]]
"""A name without dashes, and its arguments: ("data.path", ["a", "b"])."""


def to_plain(value: object) -> Any:  # noqa: ANN401
    """Convert dataclasses, tuples and paths to YAML's mappings, lists and strings."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in list_fields(type(value))}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    return value


def config_yaml(config: object) -> str:
    """Return the settings as YAML, which `--config` reads back into an equal dataclass."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def read_step_config(directory: Path) -> dict[str, Any]:
    """Return the settings in a step's config.yaml, or {} if they can't be read."""
    try:
        settings = yaml.safe_load((directory / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


def to_options(config: object) -> list[Option]:
    """Return the settings that differ from their defaults, as command-line options.

    Parsing only these options gives an equal dataclass.
    """
    hints = {setting.name: setting.kind for setting in list_settings(type(config))}
    # A method's row overrides the defaults.
    method_settings = getattr(config, "METHODS", {}).get(getattr(config, "method", ""), {})
    defaults = flatten(to_plain(type(config)())) | to_plain(method_settings)
    options: list[Option] = []
    for name, value in non_default_values(config, defaults).items():
        kind = without_none(hints.get(name))
        if value is None or isinstance(value, bool):
            arguments = [json.dumps(value)]
        elif _can_be_arguments(value) and typing.get_args(kind)[:1] == (str,):
            arguments = list(value)
        elif isinstance(value, list | dict):
            arguments = [json.dumps(value)]
        else:
            arguments = [str(value)]
        options.append((name, arguments))
    return options


def non_default_values(config: object, defaults: Mapping[str, object]) -> dict[str, Any]:
    """Return, by dotted name, the settings that differ from `defaults`, which has the same form.

    Settings in a section that is null in `defaults`, or in a list, are compared with the defaults
    of their class.
    """
    settings = {setting.name: setting for setting in list_settings(type(config))}
    changed: dict[str, Any] = {}
    for name, value in flatten(to_plain(config)).items():
        setting, section = settings.get(name), name.rpartition(".")[0]
        default, is_first = defaults.get(name, dataclasses.MISSING), False
        if setting and section in defaults:  # its first setting shows that the section is on
            default = to_plain(setting.default)
            is_first = not any(other.startswith(f"{section}.") for other in changed)
        if value != default or is_first:
            changed[name] = _without_defaults(setting and setting.kind, value)
    return changed


def _without_defaults(kind: object, value: Any) -> Any:  # noqa: ANN401
    """Remove from a list of dataclasses the settings that have their class's defaults."""
    item_class = items_class(without_none(kind))
    if item_class is None:
        return value
    defaults = {field.name: to_plain(field.default) for field in dataclasses.fields(item_class)}
    return [{k: x for k, x in item.items() if x != defaults[k]} for item in value]


def _can_be_arguments(value: object) -> bool:
    """Return whether a list of strings can be given as arguments rather than as JSON."""
    if not isinstance(value, list) or not value:
        return False
    return not any(str(item).startswith(("[", "{", "-")) for item in value)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: {"model": {"path": "x"}} becomes {"model.path": "x"}."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `flatten`: {"optim.lr": 1} becomes {"optim": {"lr": 1}}."""
    settings: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        inner = settings
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return settings


def make_portable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a step's settings without `output_dir`; paths next to it become OUT/NAME.

    A run that was moved, or is given by a different path, then has the same settings.
    """
    root = Path(str(settings.get("output_dir", ""))).parent

    def make_relative(name: str, value: object) -> object:
        is_inside = name.endswith(".path") and isinstance(value, str) and Path(value).parent == root
        return f"OUT/{Path(str(value)).name}" if is_inside else value

    flat = flatten(settings)
    flat.pop("output_dir", None)
    return {name: make_relative(name, value) for name, value in flat.items()}
