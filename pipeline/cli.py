"""Settings from files and the command line, and how commands end.

The steps use:

    parse_step(config_class, argv) -> config           presets, then dotted overrides, then checks
    write_config(config, path) -> None                 YAML that repeats the run
    run_main(main, argv=None) -> NoReturn              calls main(argv); wrong input exits 2

A step's module ends with

    def main(argv: Sequence[str]) -> None:
        config = parse_step(SFTConfig, argv)
        ...

    if __name__ == "__main__":
        run_main(main)

`python -m step1_sft.train --config a.yaml --config b.yaml --model.optim.lr 1e-4`: dataclass
defaults, then each file in order, then the command line. Option names take dashes or underscores;
lists are written with spaces (`--data.path a.jsonl b.jsonl`) or as JSON; a switch alone is true.
"""

import dataclasses
import difflib
import json
import os
import re
import sys
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import docstring_parser
import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from pipeline.errors import ConfigError, UserError

C = TypeVar("C")
Option = tuple[str, list[str]]
"""A name without its dashes, and the words that follow it: ("data.path", ["a", "b"])."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Layer:
    """Settings from one place, nested as in the dataclass; later layers win."""

    settings: Mapping[str, Any]

    origin: str
    """The file or flag they came from, for error messages."""


def parse_step(config_class: type[C], argv: Sequence[str]) -> C:
    """The step's settings: defaults, then each `--config` in order, then dotted overrides.

    `--help` and `--print_config` print and exit with code 0; `--local_rank`, which some launchers
    add, is ignored.

    Raises:
        ConfigError: a file or setting can't be used; the sentence names it.
    """
    layers: list[Layer] = []
    overrides: list[Option] = []
    print_config = False
    for name, values in split_options(argv):
        match name:
            case "help":
                _say(step_help(config_class))
                raise SystemExit(0)
            case "print_config":
                print_config = True
            case "local_rank":
                continue
            case "config":
                layers += [read_layer(Path(value)) for value in one_or_more(name, values)]
            case _:
                overrides.append((name, values))
    config = build_config(config_class, layers, overrides)
    if print_config:
        _say(config_yaml(config))
        raise SystemExit(0)
    return config


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
    merged: dict[str, Any] = {}
    for layer in layers:
        _check_names(config_class, layer, section)
        _merge(config_class, merged, layer.settings)
    arguments = ["--config", json.dumps(merged, default=str)] if merged else []
    for name, values in overrides:
        kind = _type_of(config_class, name)
        if kind is None:
            raise _unknown(config_class, name, section=section, where="")
        arguments.append(f"--{name}={_as_word(f'--{section}{name}', kind, values)}")
    try:
        parsed = _parser(config_class).parse_args(arguments)
    except ArgumentError as error:
        raise ConfigError(_one_sentence(str(error), section)) from None
    return _instantiate(config_class, parsed, section)


def split_options(argv: Sequence[str]) -> list[Option]:
    """The options of a command line, dashes in their names turned to underscores.

    Raises:
        ConfigError: a word stands before the first option.
    """
    options: list[Option] = []
    for word in argv:
        if word == "-h":
            options.append(("help", []))
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options.append((name.replace("-", "_"), [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            raise ConfigError(f"unexpected word {word!r}; options start with --")
    return options


def one_or_more(name: str, values: list[str]) -> list[str]:
    """`values`, or a ConfigError that says the option `--name` needs one."""
    if not values:
        raise ConfigError(f"--{name} needs a value")
    return values


def read_layer(path: Path) -> Layer:
    """The settings in a YAML (or JSON) file.

    Raises:
        ConfigError: no such file, not YAML, or not a mapping of names to values.
    """
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} can't be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--config {path} is not valid YAML{line}") from None
    if settings is None:
        settings = {}
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError(f"--config {path} must hold settings, `name: value`")
    return Layer(settings, str(path))


def config_yaml(config: object) -> str:
    """The settings as YAML that `--config` reads back to an equal dataclass."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


def write_config(config: object, path: Path) -> None:
    """Write the settings so that `--config path` repeats the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(config_yaml(config), encoding="utf-8")
    partial.replace(path)


def run_main(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Call `main(argv)` and exit: 0 when it returns, 2 on a `UserError`, 130 on Ctrl-C.

    Errors that are the user's to mend become one line on standard error, printed by the first
    process only. A `KeyboardInterrupt` with a message prints it. Anything else keeps its traceback.
    """
    try:
        main(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        complain(f"error: {error}")
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt as interrupt:
        complain(str(interrupt) or "interrupted")
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0)


def complain(sentence: str) -> None:
    """One line on standard error, from the first process only."""
    if _is_first_process():
        sys.stderr.write(" ".join(sentence.split()) + "\n")
        sys.stderr.flush()


def step_help(config_class: type) -> str:
    """The `--help` text of a step."""
    return _parser(config_class).format_help()


def setting_names(config_class: type) -> list[str]:
    """Dotted names of all settings: "seed", "model.optim.lr", ..."""
    return [name for name, _ in _settings(config_class)]


def _say(text: str) -> None:
    if _is_first_process():
        sys.stdout.write(text.rstrip("\n") + "\n")


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _parser(config_class: type) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    summary = (config_class.__doc__ or "").strip().splitlines()[0]
    parser = ArgumentParser(
        prog=f"python -m {config_class.__module__.partition('.')[0]}.train",
        usage="%(prog)s [--config FILE ...] [--SETTING VALUE ...]",
        description=summary,
        exit_on_error=False,
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of settings; several stack.")
    parser.add_class_arguments(config_class)
    return parser


# --- the tree of settings -------------------------------------------------------------------------


def _section(kind: object) -> type | None:
    """The dataclass in `kind`, which may be `SomeConfig` or `SomeConfig | None`."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        inner = [part for part in typing.get_args(kind) if part is not types.NoneType]
        return _section(inner[0]) if len(inner) == 1 else None
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _settings(config_class: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted names and types of all settings, sections before what is in them."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        kind = hints[field.name]
        section = _section(kind)
        if section is None or section is not kind:
            yield prefix + field.name, kind
        if section is not None:
            yield from _settings(section, f"{prefix}{field.name}.")


def _type_of(config_class: type, name: str) -> object:
    """The type of the setting `name`; None where there is no such setting."""
    head, _, rest = name.partition(".")
    kind = typing.get_type_hints(config_class).get(head)
    if kind is None or not rest:
        return kind
    section = _section(kind)
    if section is not None:
        return _type_of(section, rest)
    return str if typing.get_origin(kind) is dict else None  # data.fields.prompt


def _check_names(config_class: type, layer: Layer, section: str) -> None:
    """Raise unless every name in the layer is a setting."""

    def walk(settings: Mapping[str, Any], prefix: str) -> None:
        for key, value in settings.items():
            name = prefix + str(key)
            kind = _type_of(config_class, name)
            if kind is None:
                raise _unknown(config_class, name, section=section, where=layer.origin)
            if _section(kind) is None:
                continue
            if isinstance(value, Mapping):
                walk(value, name + ".")
            elif value is not None or _section(kind) is kind:
                raise ConfigError(f"{section}{name} in {layer.origin} holds no settings: {value}")

    walk(layer.settings, "")


def _merge(config_class: type, into: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Lay `settings` over `into`: sections merge, every other value replaces."""
    hints = typing.get_type_hints(config_class)
    for name, value in settings.items():
        section = _section(hints[name])
        if section is not None and isinstance(value, Mapping):
            below = into.get(name)
            into[name] = below if isinstance(below, dict) else {}
            _merge(section, into[name], value)
        elif isinstance(value, str) and typing.get_origin(hints[name]) is tuple:
            into[name] = _items(hints[name], [value])
        else:
            into[name] = value


def _instantiate(config_class: type[C], values: Namespace, path: str) -> C:
    """The dataclass; a ConfigError names the setting by its full dotted path."""
    hints = typing.get_type_hints(config_class)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):  # pyright: ignore[reportArgumentType]
        value = values[field.name]
        section = _section(hints[field.name])
        if section is not None and isinstance(value, Namespace):
            value = _instantiate(section, value, f"{path}{field.name}.")
        arguments[field.name] = value
    try:
        return config_class(**arguments)
    except ConfigError as error:
        sentence = _with_path(str(error), path, list(arguments))
        raise ConfigError(sentence) from None


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


# --- words and sentences --------------------------------------------------------------------------


def _as_word(option: str, kind: object, values: list[str]) -> str:
    """The words after an option as the one word that jsonargparse reads."""
    if typing.get_origin(kind) is tuple:
        if len(values) == 1 and values[0].startswith("["):
            return values[0]
        return json.dumps(_items(kind, values))
    if not values and kind is bool:
        return "true"
    if not values and _section(kind) is not None:
        return "{}"
    if _section(kind) is not None and values != ["null"] and not values[0].startswith("{"):
        raise ConfigError(f"{option} holds settings: set them one by one, {option}.NAME VALUE")
    if len(values) != 1:
        got = f"got {len(values)}: {' '.join(values)}" if values else "got none"
        raise ConfigError(f"{option} takes one value, {got}")
    return values[0]


def _items(kind: object, words: list[str]) -> list[str]:
    """The items of a list setting; numbers may be joined by commas: "2,4,4"."""
    numeric = set(typing.get_args(kind)) <= {int, float}
    return [item for item in ",".join(words).split(",") if item] if numeric else words


def _unknown(config_class: type, name: str, *, section: str, where: str) -> ConfigError:
    """The error for a name that is no setting, with the likely meant ones."""
    place = f" in {where}" if where else ""
    hint = _did_you_mean(config_class, name)
    meant = " or ".join(section + match for match in hint)
    tail = f"; did you mean {meant}?" if hint else "; --help lists them"
    return ConfigError(f"there is no setting {section}{name}{place}{tail}")


def _did_you_mean(config_class: type, name: str) -> list[str]:
    """Up to two settings whose name is close, or whose description mentions `name`."""
    names = setting_names(config_class)
    last = name.rpartition(".")[2]
    same_end = [known for known in names if known.rpartition(".")[2] == last]
    mentioned = _settings_that_mention(config_class, last)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    ends = {known.rpartition(".")[2]: known for known in reversed(names)}
    close_ends = [ends[end] for end in difflib.get_close_matches(last, ends, n=1, cutoff=0.75)]
    return (same_end or mentioned or close or close_ends)[:2]


def _settings_that_mention(config_class: type, word: str, prefix: str = "") -> list[str]:
    """Settings whose description has `(word)`: what other systems call them."""
    found: list[str] = []
    hints = typing.get_type_hints(config_class)
    for base in reversed(config_class.__mro__[:-1]):
        found += [
            prefix + parameter.arg_name
            for parameter in docstring_parser.parse_from_object(base).params
            if f"({word})" in (parameter.description or "") and parameter.arg_name in hints
        ]
    for name, kind in hints.items():
        section = _section(kind)
        if section is not None:
            found += _settings_that_mention(section, word, f"{prefix}{name}.")
    return list(dict.fromkeys(found))


def _one_sentence(message: str, section: str) -> str:
    """The parser's multi-line message as one sentence that names the setting."""
    names = re.findall(r'Parser key "([^"]+)":', message)
    if not names:
        return " ".join(message.split())
    # An optional section reports its own trouble below the section's, then the other choice, null.
    problem = message.rpartition(f'Parser key "{names[-1]}":')[2]
    if len(names) > 1:
        problem = problem.split("\n    -")[0]
    name = section + ".".join(names)
    expected = re.findall(r"Expected (?:an? )?(.+?)(?=\. Got value|$)", problem, re.MULTILINE)
    got = re.search(r"(?:Got|Given) value: (.+)", problem)
    if not expected or not got:
        return f"{name}: {' '.join(problem.split())}"
    kinds = " or ".join(_plain_kind(kind) for kind in expected)
    return f"{name} must be {kinds}, got {got[1].strip()}"


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "tuple": "a list",
    "dict": "a mapping of names to values",
    "NoneType": "null",
    "Path": "a path",
}


def _plain_kind(kind: str) -> str:
    """A type as jsonargparse prints it, in words."""
    kind = kind.removeprefix("typing.")
    if choices := re.fullmatch(r"Literal\[(.*)\]", kind):
        return "one of " + choices[1]
    if length := re.fullmatch(r"tuple with (\d+) elements", kind):
        return f"a list of {length[1]}"
    name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind).strip()
    return _KINDS.get(name, name)


def _plain(value: object) -> object:
    """Dataclasses, tuples and paths as what YAML has."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
