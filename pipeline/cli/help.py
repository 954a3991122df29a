"""The text of `--help`, made from the settings' own docstrings.

A step has over a hundred settings. Its help describes the step's own settings first, then those of
all steps, and lists the settings of other sections by name; `--help all` describes every setting.
"""

import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType

from pipeline.settings.fields import (
    Setting,
    list_settings,
    section_class,
    section_descriptions,
    without_none,
)
from pipeline.system.installation import MODULE

INDENT, WIDTH = 28, 96


def step_help(config_class: type, *, full: bool = False) -> str:
    """Return the `--help` text of a step; with `full`, also describe the sections' settings."""
    settings = list(list_settings(config_class))
    module = f"{config_class.__module__.partition('.')[0]}.train"
    lines = [
        f"usage: {MODULE} {module} [--config FILE ...] [--SETTING VALUE ...]",
        "",
        (config_class.__doc__ or "").strip().splitlines()[0],
        "",
        *help_entry("--help [all]", "Print this help; `all` describes every setting."),
        *help_entry("--config FILE ...", "YAML settings files; later ones override earlier ones."),
        *help_entry("--zero-config FILE", "DeepSpeed file; overrides --config: docs/deepspeed.md."),
        *help_entry("--print_config", "Print the resolved settings and exit."),
    ]
    specific, common = _split_by_origin(config_class, settings)
    sections = dict(section_descriptions(config_class))
    for title, group in (("Settings of this step", specific), ("Settings of every step", common)):
        shown = [s for s in group if full or s.name.partition(".")[0] not in sections]
        if shown:
            lines += ["", title, *settings_help(shown)]
    if not full:
        lines += ["", *_describe_sections(settings, sections)]
    return "\n".join(lines)


def settings_help(settings: Iterable[Setting], *, dashes: bool = False) -> list[str]:
    """Return help lines for settings: name, kind of value, description and default."""
    lines: list[str] = []
    for setting in settings:
        description = f"{setting.description} {_format_default(setting)}".strip()
        name = setting.name.replace("_", "-") if dashes else setting.name
        option = f"--{name} {_placeholder(setting.kind)}".rstrip()
        if len(option) + 2 > WIDTH:
            option, choices = option.split(" ", 1)
            option = f"{option} NAME"
            description = f"One of {choices.replace(',', ', ')}. {description}"
        lines += help_entry(option, description)
    return lines


def help_entry(option: str, description: str) -> list[str]:
    """Return an option's help lines; after a long name, the description is on a new line."""
    first, wrapped = f"  {option}", textwrap.wrap(description, WIDTH - INDENT) or [""]
    if len(first) + 2 <= INDENT:
        first, wrapped = first.ljust(INDENT) + wrapped[0], wrapped[1:]
    return [first, *(" " * INDENT + line for line in wrapped)]


def _split_by_origin(
    config_class: type, settings: Sequence[Setting]
) -> tuple[list[Setting], list[Setting]]:
    """Return the settings that the step's package declares, and the settings of base classes."""
    package = config_class.__module__.partition(".")[0]
    shared = {
        field.name
        for base in config_class.__mro__[1:]
        if is_dataclass(base) and base.__module__.partition(".")[0] != package
        for field in fields(base)
    }
    specific = [s for s in settings if s.name.partition(".")[0] not in shared]
    # Settings of the most derived class precede those inherited within the package.
    names = {field.name for field in fields(config_class)}
    annotated = (names & base.__annotations__.keys() for base in config_class.__mro__)
    declared = next(filter(None, annotated))
    specific.sort(key=lambda setting: setting.name.partition(".")[0] not in declared)
    return specific, [s for s in settings if s.name.partition(".")[0] in shared]


def _describe_sections(settings: Sequence[Setting], sections: Mapping[str, str]) -> Iterator[str]:
    """Yield the description of each section and the names of its settings."""
    yield "Sections, described by --help all"
    for section, description in sections.items():
        prefix = f"{section}."
        names = [s.name.removeprefix(prefix) for s in settings if s.name.startswith(prefix)]
        nested = {name.partition(".")[0] for name in names if "." in name}
        names = dict.fromkeys(name.partition(".")[0] for name in names)
        yield from help_entry(f"--{section}.SETTING", description)
        yield from names_help(f"{name}.*" if name in nested else name for name in names)


def names_help(names: Iterable[str]) -> list[str]:
    """Return help lines that list names, indented like descriptions."""
    lines = textwrap.wrap(" ".join(names), WIDTH - INDENT, break_on_hyphens=False)
    return [" " * INDENT + line for line in lines]


def _format_default(setting: Setting) -> str:
    value = setting.default
    if value is None or value is False or value in ((), {}, "", Path()):
        return ""
    items = value if isinstance(value, tuple) else (value,)
    formatted = (f"{item:g}" if isinstance(item, float) else str(item) for item in items)
    return f"(default: {'true' if value is True else ' '.join(formatted)})"


def _placeholder(kind: object) -> str:
    """Return a value's placeholder in `--help`: N, NUMBER, {auto,fp32,bf16,fp16}, ..."""
    kind = without_none(kind)
    if section_class(kind) is not None:
        return ""
    if typing.get_origin(kind) is typing.Literal:
        return "{" + ",".join(str(choice) for choice in typing.get_args(kind)) + "}"
    if typing.get_origin(kind) is tuple:
        first, *rest = typing.get_args(kind)
        if section_class(first) is not None:
            return "JSON"
        return f"{_placeholder(first)} ..." if rest == [...] else _placeholder(first) + ",..."
    if typing.get_origin(kind) is dict:
        return "NAME=VALUE ..."
    names = {int: "N", float: "NUMBER", bool: "[true|false]", Path: "PATH", NoneType: ""}
    return names.get(kind, "TEXT") if isinstance(kind, type) else "VALUE"
