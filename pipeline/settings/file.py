"""Files of settings: YAML (or JSON, which is YAML), read strictly.

What YAML forgives and a user can't have meant is refused: a name twice in one section. What it
refuses is reported with file, line and mend.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError
from pipeline.settings.build import Layer


def read_settings(path: Path) -> Layer:
    """The settings in a file, nested as they stand there; an empty file has none.

    Raises:
        ConfigError: no such file, not UTF-8, not YAML, a name twice, or not a mapping of names to
            values; the sentence names the file and, where there is one, the line.
    """
    text = ""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        settings = yaml.safe_load(text)
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
        where = _place_and_hint(error, text.splitlines())
        raise ConfigError(f"--config {path} is not valid YAML{where}") from None
    except RecursionError:
        raise ConfigError(f"--config {path} is nested too deeply to be settings") from None
    except ValueError as error:  # a date such as 2026-99-99
        raise ConfigError(f"--config {path} has a value that can't be read: {error}") from None
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(
            f"--config {path} must hold settings, `name: value`; it holds {_kind(settings)}"
        )
    _refuse_duplicates(root, path)
    _refuse_odd_names(settings, path)
    return Layer(settings, str(path), is_file=True)


def _place_and_hint(error: yaml.YAMLError, lines: Sequence[str]) -> str:
    """What follows "is not valid YAML": " in line 3: ..."."""
    mark: Any = getattr(error, "problem_mark", None)
    problem, context = str(getattr(error, "problem", "")), str(getattr(error, "context", ""))
    if mark is None:
        reason = str(getattr(error, "reason", "")) or " ".join(str(error).split())
        return f": {reason}"
    opened = getattr(error, "context_mark", None)
    begins = opened.line + 1 if opened is not None else mark.line + 1
    number = int(mark.line)
    line = lines[number] if number < len(lines) else ""
    if "values are not allowed" in problem and line.count(": ") + line.endswith(":") < 2:
        problem = "does not fit"
    return f" in line {mark.line + 1}: {_hint(problem, context, begins)}"


HINTS = (
    (r"'\\t'", "a tab stands where only spaces may; indent with spaces"),
    ("flow sequence", "the [ of line {begins} is not closed, or a comma is missing in it"),
    ("flow mapping", "the {{ of line {begins} is not closed, or a comma is missing in it"),
    ("found '<stream end>'", "a bracket or a value is missing at the end of the file"),
    ("quoted scalar", "the quotation mark of line {begins} is not closed"),
    ("could not find expected ':'", "write `name: value`; no colon follows the name"),
    (
        "does not fit",
        "it does not go on from the line above, which lacks its colon, or is indented less",
    ),
    ("values are not allowed", "a second colon; put quotation marks around a value that has one"),
    (
        "block (mapping|collection)",
        "it fits nothing above it; the settings of a section, here that of line {begins}, begin in"
        " one column",
    ),
    ("cannot start any token", "{problem}; put quotation marks around the value"),
)
"""What to do about an error, by the scanner's or the parser's words for it."""


def _hint(problem: str, context: str, begins: int) -> str:
    complaint = f"{problem} {context}"
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, complaint)), "{problem}")
    return hint.format(problem=problem, begins=begins)


def _refuse_duplicates(root: yaml.Node | None, path: Path) -> None:
    for section, node in _mappings(root, ""):
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            name = f"{section}{key.value}"
            if isinstance(key, yaml.ScalarNode) and key.value != "<<" and name in lines:
                raise ConfigError(
                    f"{name} stands twice in --config {path}, in lines {lines[name]} and {line};"
                    " keep one of them"
                )
            lines[name] = line


def _mappings(node: yaml.Node | None, section: str) -> Iterator[tuple[str, yaml.MappingNode]]:
    """Each mapping of the file, with what its names begin with."""
    if isinstance(node, yaml.MappingNode):
        yield section, node
        for key, value in node.value:
            yield from _mappings(value, f"{section}{key.value}.")
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _mappings(item, section)


def _refuse_odd_names(settings: Mapping[Any, Any], path: Path, section: str = "") -> None:
    for name, value in settings.items():
        if not isinstance(name, str):
            raise ConfigError(
                f"{section}{name} in --config {path} is {_kind(name)} where a setting's name"
                " belongs; settings are `name: value`"
            )
        if isinstance(value, Mapping):
            _refuse_odd_names(value, path, f"{section}{name}.")


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "text", bool: "true or false", dict: "settings"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else "a value")
