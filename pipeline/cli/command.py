"""The command line of programs other than training: settings as options, help, errors.

    config = read_command(MyConfig, argv, usage="python -m x --path DIR", about="Do it.")

The steps have `pipeline.cli.options.parse_step`, which also reads files of settings.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pipeline.cli.help import help_entry, settings_help
from pipeline.cli.options import say, split_options
from pipeline.settings.build import build_config
from pipeline.settings.fields import Option, did_you_mean, list_settings
from pipeline.system.errors import ConfigError, suggestion

C = TypeVar("C")


def read_command(
    config_class: type[C],
    argv: Sequence[str],
    *,
    usage: str | Sequence[str],
    about: str,
    aliases: Mapping[str, str] | None = None,
    gather: Callable[[Sequence[Option]], list[Option]] = list,
) -> C:
    """The settings that a command line says; `--help` prints and exits with code 0.

    Args:
        config_class: a frozen dataclass.
        argv: the words after the program's name.
        usage: the command with the options to begin with, in one line or several; help lists
            these first.
        about: what it does, in a sentence.
        aliases: other names of settings.
        gather: makes one option of several, where one may be given more than once: `joined`.

    Raises:
        ConfigError: an unknown setting, a wrong type or value; it names the option as it was typed.
    """
    given = split_options(argv)
    if any(name == "help" for name, _ in given):
        say(_help(config_class, usage, about))
        raise SystemExit(0)
    other = aliases or {}
    options = [(other.get(name, name), words) for name, words in given]
    typed = {name: word for (name, _), word in zip(options, _typed(argv), strict=True)}
    known = list(list_settings(config_class))
    names = {each.name for each in known}
    for name, _ in options:
        if name.partition(".")[0] not in names:
            close = " or ".join(map(as_option, did_you_mean(known, name)))
            hint = f"did you mean {close}?" if close else "--help lists the options"
            raise ConfigError(f"there is no option {typed[name]}; {hint}")
    try:
        return build_config(config_class, [], gather(options))
    except ConfigError as error:
        raise ConfigError(_with_option(str(error), names, typed)) from None


def read_files_command(
    config_class: type[C], argv: Sequence[str], *, usage: str, about: str
) -> tuple[list[str], C]:
    """The words before the first option, which name files, and the settings after them.

    Raises:
        ConfigError: no file is named, or as `read_command`.
    """
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    config = read_command(config_class, argv[count:], usage=usage, about=about)
    if not count:
        raise ConfigError(f"a file is missing: {usage}")
    return list(argv[:count]), config


def joined(*names: str) -> Callable[[Sequence[Option]], list[Option]]:
    """For `gather`: an option of one of these names may be given once for all words, or for each.

    Its words are one list, in the order of the command line.
    """

    def gather(options: Sequence[Option]) -> list[Option]:
        found = [option for option in options if option[0] not in names]
        for name in names:
            words = [word for each, several in options if each == name for word in several]
            if words:
                found.append((name, [json.dumps(words)]))
        return found

    return gather


def choose_command(
    commands: Mapping[str, C], argv: Sequence[str], help_text: Callable[[], str]
) -> tuple[C, Sequence[str]]:
    """The command of a program that the first word names, and the words after it.

    Without a word, or with `--help`, it prints the help and exits with code 0.

    Raises:
        ConfigError: there is no such command.
    """
    if not argv or argv[0] in ("-h", "--help"):
        say(help_text())
        raise SystemExit(0)
    name, *words = argv
    if name not in commands:
        raise ConfigError(f"there is no command {name!r}; {suggestion(name, commands)}")
    return commands[name], words


def as_option(name: str) -> str:
    """How an option is spelled: --best-of of `best_of`."""
    return f"--{name.replace('_', '-')}"


def _typed(argv: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in argv if word == "-h" or word.startswith("--")]


def _with_option(sentence: str, names: set[str], typed: Mapping[str, str]) -> str:
    """The sentence with its first word, where that is a setting, as the option that was typed."""
    found = re.match(r"(?:--)?([A-Za-z][\w.-]*)", sentence)
    name = found[1].replace("-", "_") if found else ""
    if found is None or name not in names:
        return sentence
    return typed.get(name, as_option(name)) + sentence[found.end() :]


def _help(config_class: type, usage: str | Sequence[str], about: str) -> str:
    first, *others = [usage] if isinstance(usage, str) else usage
    named = re.findall(r"--([\w-]+)", " ".join([first, *others]))
    place = {name.replace("-", "_"): index for index, name in enumerate(reversed(named))}
    settings = list(list_settings(config_class))
    settings.sort(key=lambda each: -place.get(each.name, -1))
    return "\n".join(
        [
            f"usage: {first}",
            *(f"       {each}" for each in others),
            "",
            about,
            "",
            *help_entry("--help", "Print this and stop."),
            *settings_help(settings, dashes=True),
        ]
    )
