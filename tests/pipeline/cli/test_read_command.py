"""The command line of programs other than training."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from inference.generate import GenerateConfig
from pipeline.cli.options import read_command
from pipeline.system.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a program."""

    best_of: int = 4
    """Answers to each prompt."""

    write: Literal["one", "two"] = "one"

    output: Path = Path("out")

    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.best_of > 1, f"--best-of must be at least 2, got {self.best_of}")


def read(*argv: str) -> Settings:
    return read_command(
        Settings,
        argv,
        usage=("python -m x --write one", "python -m x"),
        about="Do it.",
        aliases={"out": "output"},
    )


def test_a_list_may_be_one_option_or_several() -> None:
    assert read("--stop", "a", "b").stop == read("--stop", "a", "--stop", "b").stop == ("a", "b")


def test_dashes_underscores_and_aliases_are_the_same_setting() -> None:
    assert read("--best-of", "3", "--out", "a") == Settings(best_of=3, output=Path("a"))
    assert read("--best_of=3", "--output", "a") == Settings(best_of=3, output=Path("a"))


@pytest.mark.parametrize(
    ("words", "sentence"),
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
def test_a_sentence_names_the_option(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(*words.split())
    assert str(error.value).startswith(sentence)


COMMAND = """
import os, sys
from inference.generate import GenerateConfig
from pipeline.cli.options import read_command
read_command(GenerateConfig, sys.argv[1:], usage="", about="")
import torch
print(torch.get_num_threads(), os.environ["GOMP_SPINCOUNT"])
"""
NEEDED = ("--path", "a", "--prompts", "b", "--out", "c")


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("--threads", "1"), {"RLHF_THREADS": "2", "GOMP_SPINCOUNT": "7"}),
        ((), {"RLHF_THREADS": "1"}),
    ],
)
def test_a_command_computes_with_the_threads_that_are_asked_for(
    words: tuple[str, ...], variables: dict[str, str]
) -> None:
    environment = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    command = [sys.executable, "-c", COMMAND, *NEEDED, *words]

    said = subprocess.check_output(command, env=environment | variables, text=True)

    threads, spins = said.split()
    assert threads == "1"
    assert spins in ([variables["GOMP_SPINCOUNT"]] if words else ["0", "10000"])


def test_no_thread_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--threads must be a number of threads above 0"):
        read_command(GenerateConfig, [*NEEDED, "--threads", "0"], usage="", about="")
