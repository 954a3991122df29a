"""The command line: options, settings files, help, and exit codes.

The steps use:

    parse_step(config_class, argv) -> config           presets, then dotted overrides, then checks
    write_config(config, path) -> None                 YAML that repeats the run
    run_main(main, argv=None) -> NoReturn              calls main(argv); exits with 2 on wrong input

A step's module ends with

    def main(argv: Sequence[str]) -> None:
        config = parse_step(SFTConfig, argv)
        ...

    if __name__ == "__main__":
        run_main(main)

and begins with `prepare_imports(SFTConfig)` under the same condition.

`python -m step1_sft.train --config a.yaml --config b.yaml --model.optim.lr 1e-4` applies the
dataclass's defaults, then the method's defaults, then each file in order, then the command line.
Option names may contain dashes or underscores; lists are written with spaces
(`--data.path a.jsonl b.jsonl`) or as JSON; a switch without a value is true.
"""

import argparse
import gc
import json
import os
import re
import signal
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

from pipeline.cli.help import help_entry, settings_help, step_help
from pipeline.files.durable import write_atomically
from pipeline.parallel import launched
from pipeline.settings.build import Layer, build_config, method_layer, read_settings
from pipeline.settings.fields import Option, config_yaml, did_you_mean, list_settings
from pipeline.system.errors import (
    EXIT_USER_ERROR,
    ConfigError,
    DivergedError,
    JobFailed,
    UserError,
    exit_code,
    is_disk_full,
    is_out_of_memory,
    require,
)
from pipeline.system.installation import find_preset
from pipeline.system.signals import EXIT_INTERRUPTED, exit_interrupted, exit_on_interrupt
from pipeline.system.threads import set_compute_threads, shorten_spinning

ConfigT = TypeVar("ConfigT")


def parse_step(config_class: type[ConfigT], argv: Sequence[str]) -> ConfigT:
    """Merge the settings of a step from layers; later layers override earlier ones.

    The layers are the defaults, the method's defaults, each `--config` in order, `--zero-config`,
    and dotted overrides. `--help [all]` and `--print_config` print and exit with code 0;
    `--local_rank`, which some launchers add, is ignored.

    Raises:
        ConfigError: a file or setting can't be used; the message names it.
    """
    layers: list[Layer] = []
    overrides: list[Option] = []
    zero_config: Path | None = None
    print_config = False
    for name, values in split_options(argv):
        match name:
            case "help":
                print_output(step_help(config_class, full=values == ["all"]))
                raise SystemExit(0)
            case "print_config":
                print_config = True
            case "local_rank":
                continue
            case "config":
                layers += [_select_section(layer, config_class) for layer in load_layers(values)]
            case "zero_config":
                got = " ".join(values) or "none"
                require(len(values) == 1, f"--zero-config takes one file, got {got}")
                zero_config = Path(values[0])
            case _:
                overrides.append((name, values))
    layers.insert(0, method_layer(config_class, layers, overrides))
    if zero_config is not None:
        from pipeline.config.deepspeed import deepspeed_layer, ignored_keys_notice

        given = config_class, zero_config, layers, overrides
        layers.append(deepspeed_layer(*given, world=launched.world_size()))
        if notice := ignored_keys_notice(zero_config):
            print_notice(notice)
    config = build_config(config_class, layers, overrides)
    if print_config:
        print_output(config_yaml(config))
        raise SystemExit(0)
    return config


def _select_section(layer: Layer, config_class: type) -> Layer:
    """Return the step's section if a file's settings are grouped by step, else the whole file."""
    section = getattr(config_class, "section", "")
    settings = layer.settings.get(section) if section else None
    return replace(layer, settings=settings) if isinstance(settings, dict) else layer


def prepare_imports(config_class: type) -> None:
    """Prepare a step's module before it imports PyTorch, which takes seconds.

    If the command line requests help or the settings, they are printed and the process exits. Until
    `run_main`, Ctrl-C stops the process without a traceback from an import, and the garbage
    collector, which takes a quarter of the import time, is off. OpenMP's spin time is set here.
    """
    gc.disable()
    exit_on_interrupt()
    names = {word.partition("=")[0].replace("_", "-") for word in sys.argv[1:]}
    if names & {"-h", "--help", "--print-config"}:

        def main(argv: Sequence[str]) -> None:
            parse_step(config_class, argv)

        run_main(main)
    shorten_spinning(os.environ)


def split_options(argv: Sequence[str]) -> list[Option]:
    """Return the options of a command line, with dashes in names converted to underscores.

    Raises:
        ConfigError: a word precedes the first option.
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
            raise ConfigError(f"unexpected argument {word!r}; options start with --")
    return options


def load_layers(paths: Sequence[str]) -> list[Layer]:
    """Read the settings of the YAML (or JSON) files that follow `--config`.

    A preset is found by its name, such as `opt-1.3b.yaml`, from any working directory.

    Raises:
        ConfigError: no file is given, or the file doesn't exist or is not a YAML mapping.
    """
    require(bool(paths), "--config needs a file")
    return [read_settings(find_preset(Path(path).expanduser())) for path in paths]


def write_config(config: object, path: Path) -> None:
    """Write the settings so that `--config path` repeats the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, config_yaml(config).encode())


def run_main(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Call `main(argv)` and exit: 0 when it returns, 2 on a `UserError`, 130 on Ctrl-C.

    An error that the user can fix becomes one line on standard error, printed by one process only.
    The message of a `KeyboardInterrupt`, if any, is printed. The exit code is 79 if memory ran out,
    80 if training diverged, and 81 if a disk was full. Other errors keep their traceback.
    """
    if signal.getsignal(signal.SIGINT) is exit_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not gc.isenabled():
        gc.freeze()  # imported modules are never collected
        gc.enable()
    try:
        main(sys.argv[1:] if argv is None else argv)
    except (UserError, DivergedError) as error:
        print_error(f"error: {error}", once_per_job=True)
        sys.exit(exit_code(error))
    except JobFailed as failure:
        # Skip interpreter shutdown, where threads of a broken process group would abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.code if isinstance(failure.code, int) else 1)
    except KeyboardInterrupt as interrupt:
        print_error(str(interrupt) or "interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if is_disk_full(error):
            print_error(f"error: the disk is full: {error}; free some space", once_per_job=True)
        elif is_out_of_memory(error):
            print_error(f"out of memory: {error}")
        elif "home directory" in str(error):  # from Path.expanduser
            print_error("error: the home directory in a path (~) is unknown; use the full path")
            sys.exit(EXIT_USER_ERROR)
        else:
            raise
        sys.exit(exit_code(error))
    sys.exit(0)


def print_output(text: str) -> None:
    """Print text to standard output, from rank 0 only."""
    if launched.rank() == 0:
        sys.stdout.write(text.rstrip("\n") + "\n")
        sys.stdout.flush()


def print_error(message: str, *, once_per_job: bool = False) -> None:
    """Print a line to standard error, from rank 0 or from the first process with this message."""
    if _claim_message(message) if once_per_job else launched.rank() == 0:
        sys.stderr.write(" ".join(message.split()) + "\n")
        sys.stderr.flush()


def print_notice(text: str) -> None:
    """Print lines to standard error, from rank 0; standard output is for results."""
    if launched.rank() == 0:
        sys.stderr.write(text.rstrip("\n") + "\n")
        sys.stderr.flush()


def _claim_message(message: str) -> bool:
    """Return whether this process prints a message that several processes may have to print.

    Processes of one torchrun share a directory, which torchrun removes at exit.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        return launched.rank() == 0
    marker = Path(error_file).parent.parent / f"printed-{zlib.crc32(message.encode()):08x}"
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # better twice than never
        return True
    return True


def option_name(name: str) -> str:
    """Return the name as spelled in `--help`: with dashes, except in a step's settings."""
    return "--" + (name if "." in name else name.replace("_", "-"))


def parse_command(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    usage: str | Sequence[str],
    about: str,
    aliases: Mapping[str, str] | None = None,
) -> ConfigT:
    """Read the settings of a command line; `--help` prints and exits with code 0.

    A list may be given as one option with several values, or by repeating the option. The setting
    `threads` is applied if the command has it. Help shows `usage`, the command with its most
    important options, and lists these first; `aliases` are alternative names of settings.

    Raises:
        ConfigError: a setting is unknown or has a wrong value; the message names the option.
    """
    arguments = split_options(argv)
    if any(name == "help" for name, _ in arguments):
        print_output(_format_help(config_class, usage, about))
        raise SystemExit(0)
    options: dict[str, list[str]] = {}
    repeated: set[str] = set()
    for alias, values in arguments:
        name = (aliases or {}).get(alias, alias)
        repeated |= {name} & options.keys()
        options.setdefault(name, []).extend(values)
    settings = list(list_settings(config_class))
    names = {setting.name for setting in settings}
    for name in options:
        if name.partition(".")[0] not in names:
            hint = did_you_mean(settings, name, option_name)
            raise ConfigError(f"there is no option {option_name(name)}; {hint}")
    options |= {name: [json.dumps(options[name])] for name in repeated}
    try:
        config = build_config(config_class, [], list(options.items()))
        if "threads" in names:
            set_compute_threads(getattr(config, "threads", None))
    except ConfigError as error:
        name, _, rest = str(error).partition(" ")
        setting = name.removeprefix("--")
        raise ConfigError(f"{option_name(setting) if setting in names else name} {rest}") from None
    return config


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError with the message that argparse would print."""
        raise ConfigError(f"{message}; {self.prog} --help lists the options")


def _format_help(config_class: type, usage: str | Sequence[str], about: str) -> str:
    first, *others = [usage] if isinstance(usage, str) else usage
    listed = [
        name.replace("-", "_") for name in re.findall(r"--([\w-]+)", " ".join([first, *others]))
    ]
    settings = sorted(
        list_settings(config_class),
        key=lambda setting: listed.index(setting.name) if setting.name in listed else len(listed),
    )
    usage = [f"usage: {first}", *(f"       {line}" for line in others)]
    entries = [*help_entry("--help", "Print this help and exit.")]
    entries += settings_help(settings, dashes=True)
    return "\n".join([*usage, "", about, "", *entries])
