"""The command line of programs other than training."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from inference.generate import GenerateConfig
from pipeline.cli.options import parse_command
from pipeline.system.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a program."""

    best_of: int = 4
    """Answers to each prompt."""

    write: Literal["one", "two"] = "one"

    output: Path = Path("out")

    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.best_of > 1, f"--best-of must be at least 2, got {self.best_of}")


def parse(*argv: str) -> Settings:
    return parse_command(
        Settings,
        argv,
        usage=("python -m x --write one", "python -m x"),
        about="Do it.",
        aliases={"out": "output"},
    )


def test_list_option_can_be_repeated() -> None:
    assert parse("--stop", "a", "b").stop == parse("--stop", "a", "--stop", "b").stop == ("a", "b")


def test_dashes_underscores_and_aliases_are_equivalent() -> None:
    assert parse("--best-of", "3", "--out", "a") == Settings(best_of=3, output=Path("a"))
    assert parse("--best_of=3", "--output", "a") == Settings(best_of=3, output=Path("a"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--best-of x", "--best-of must be an integer, got x"),
        ("--best_of x", "--best-of must be an integer, got x"),
        ("--best-of 1", "--best-of must be at least 2, got 1"),
        ("--best-of 2 3", "--best-of takes one value, got 2: 2 3"),
        ("--write three", "--write must be one of"),
        ("--best-off 2", "there is no option --best-off; did you mean --best-of?"),
        ("--out a b", "--output takes one value, got 2: a b"),
        ("--nonsense", "there is no option --nonsense; --help lists the options"),
    ],
)
def test_error_names_the_invalid_option(argv: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(*argv.split())
    assert str(error.value).startswith(message)


COMMAND = """
import os, sys
from inference.generate import GenerateConfig
from pipeline.cli.options import parse_command
parse_command(GenerateConfig, sys.argv[1:], usage="", about="")
import torch
print(torch.get_num_threads(), os.environ["GOMP_SPINCOUNT"])
"""
REQUIRED_OPTIONS = ("--path", "a", "--prompts", "b", "--out", "c")


@pytest.mark.parametrize(
    ("argv", "environment"),
    [
        (("--threads", "1"), {"RLHF_THREADS": "2", "GOMP_SPINCOUNT": "7"}),
        ((), {"RLHF_THREADS": "1"}),
    ],
)
def test_command_uses_the_requested_number_of_threads(
    argv: tuple[str, ...], environment: dict[str, str]
) -> None:
    inherited = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    command = [sys.executable, "-c", COMMAND, *REQUIRED_OPTIONS, *argv]

    stdout = subprocess.check_output(command, env=inherited | environment, text=True)

    threads, spins = stdout.split()
    assert threads == "1"
    assert spins in ([environment["GOMP_SPINCOUNT"]] if argv else ["0", "10000"])


def test_zero_threads_raise() -> None:
    with pytest.raises(ConfigError, match=r"^--threads must be a positive integer"):
        parse_command(GenerateConfig, [*REQUIRED_OPTIONS, "--threads", "0"], usage="", about="")
