"""The text of `--help`, made from the settings' own docstrings.

A step has over a hundred settings. Its help shows its own first, then those that all steps have,
and lists the other sections by name; `--help all` shows every setting.
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
    """The `--help` text of a step; with `full`, of its sections too, otherwise only their names."""
    settings = list(list_settings(config_class))
    module = f"{config_class.__module__.partition('.')[0]}.train"
    lines = [
        f"usage: {MODULE} {module} [--config FILE ...] [--SETTING VALUE ...]",
        "",
        (config_class.__doc__ or "").strip().splitlines()[0],
        "",
        *help_entry("--help [all]", "Print this help; with all, every setting."),
        *help_entry("--config FILE ...", "YAML files of settings; later ones win."),
        *help_entry("--zero-config FILE", "DeepSpeed file; overrides those: docs/deepspeed.md."),
        *help_entry("--print_config", "Print the resolved settings and stop."),
    ]
    own, common = _own_and_common(config_class, settings)
    sections = dict(section_descriptions(config_class))
    for title, group in (("Settings of this step", own), ("Settings of every step", common)):
        plain = [each for each in group if full or each.name.partition(".")[0] not in sections]
        if plain:
            lines += ["", title, *settings_help(plain)]
    if not full:
        lines += ["", *_sections(settings, sections)]
    return "\n".join(lines)


def settings_help(settings: Iterable[Setting], *, dashes: bool = False) -> list[str]:
    """Help lines of settings: name, kind of value, meaning, default."""
    lines: list[str] = []
    for setting in settings:
        default = _default(setting)
        meaning = f"{setting.description} {default}".strip()
        name = setting.name.replace("_", "-") if dashes else setting.name
        option = f"--{name} {_placeholder(setting.kind)}".rstrip()
        if len(option) + 2 > WIDTH:
            option, choices = option.split(" ", 1)
            option, meaning = f"{option} NAME", f"One of {choices.replace(',', ', ')}. {meaning}"
        lines += help_entry(option, meaning)
    return lines


def help_entry(option: str, meaning: str) -> list[str]:
    """Help lines of one option; after a long name, the meaning is on the next line, indented."""
    text = textwrap.wrap(meaning, WIDTH - INDENT) or [""]
    head = f"  {option}"
    if len(head) + 2 <= INDENT:
        head, text = head.ljust(INDENT) + text[0], text[1:]
    return [head, *(" " * INDENT + line for line in text)]


def _own_and_common(
    config_class: type, settings: Sequence[Setting]
) -> tuple[list[Setting], list[Setting]]:
    """The step's own settings, and those of its base class."""
    package = config_class.__module__.partition(".")[0]
    shared = {
        field.name
        for base in config_class.__mro__[1:]
        if is_dataclass(base) and base.__module__.partition(".")[0] != package
        for field in fields(base)
    }
    own = [each for each in settings if each.name.partition(".")[0] not in shared]
    # The most derived class's own settings precede those inherited within the package.
    names = {field.name for field in fields(config_class)}
    declared = next(
        mine for base in config_class.__mro__ if (mine := names & base.__annotations__.keys())
    )
    own.sort(key=lambda each: each.name.partition(".")[0] not in declared)
    return own, [each for each in settings if each.name.partition(".")[0] in shared]


def _sections(settings: Sequence[Setting], sections: Mapping[str, str]) -> Iterator[str]:
    """A paragraph for each section: its description and the names of its settings."""
    yield "Sections, described by --help all"
    for name, description in sections.items():
        names = [each.name.removeprefix(f"{name}.") for each in settings]
        names = [each for each, full in zip(names, settings, strict=True) if each != full.name]
        inner = {each.partition(".")[0] for each in names if "." in each}
        heads = dict.fromkeys(each.partition(".")[0] for each in names)
        yield from help_entry(f"--{name}.SETTING", description)
        yield from names_help(f"{head}.*" if head in inner else head for head in heads)


def names_help(names: Iterable[str]) -> list[str]:
    """Help lines that list names, indented like descriptions."""
    room = " " * INDENT
    return textwrap.wrap(
        " ".join(names), WIDTH, initial_indent=room, subsequent_indent=room, break_on_hyphens=False
    )


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None or value is False or value in ((), {}, "", Path()):
        return ""
    items = value if isinstance(value, tuple) else (value,)
    shown = (f"{item:g}" if isinstance(item, float) else str(item) for item in items)
    return f"(default: {'true' if value is True else ' '.join(shown)})"


def _placeholder(kind: object) -> str:
    """The placeholder of a value in `--help`: N, NUMBER, {auto,fp32,bf16,fp16}, ..."""
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
