"""A user's environment, read from its file without running it.

So a missing class or method is reported before any model is loaded. The text that was read is what
runs: an edit of the file during a run changes nothing.
"""

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.system.errors import ConfigError, require, suggestion
from pipeline.system.installation import ROOT
from rewards.functions import parse_python, read_text

VERBS = ("reset", "step", "reward")
"""The methods of an environment, which docs/environments.md describes."""


BUILT_IN = {"guessing": "games.py:GuessingGame", "calculator": "tools.py:Calculator"}
"""Our examples, by short name."""

REWARDS = ("get_reward", "reward")
"""What a class of tools may call its reward: a method, or for the second an attribute."""

FORMS = {
    "turns": "reset(self, row, *, seed), step(self, answer) and reward(self)",
    "tools": "reset(self, **row) and public methods with docstrings as tools",
}


@dataclass(frozen=True)
class EnvironmentFile:
    """A class as its file has it."""

    file: str
    name: str
    form: Literal["turns", "tools"] | None
    """None where a base of another file decides: whoever loads the class knows."""

    gives_reward: bool
    """Whether it has a reward of its own; of tools it may be a function's."""

    text: str

    @property
    def sha256(self) -> str:
        """The hash of the whole file."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def note(self) -> str:
        """What the log says of it: as what it was recognized."""
        has = "methods of another file" if self.form is None else FORMS[self.form]
        return f"ppo.environment: {self.name} of {self.file} has {has}"


def read_environment(path: str) -> EnvironmentFile:
    """The class that `path` names, FILE.py:CLASS or one of `BUILT_IN`.

    Raises:
        ConfigError: no such file or class, no Python, or a class that lacks a method.
    """
    where = "ppo.environment"
    if path in BUILT_IN:
        path = str(ROOT / "rewards" / "environments" / BUILT_IN[path])
    file, colon, name = path.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ConfigError(
            f"{where} must be FILE.py:CLASS or one of {', '.join(sorted(BUILT_IN))}, got {path}"
        )
    text = read_text(Path(file), where)
    tree = parse_python(text, file, where)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    require(
        name in classes,
        f"{where}: {file} has no `class {name}` at its top level; {suggestion(name, classes)}",
    )
    family, is_complete = _family(classes[name], classes)
    members = [member for node in family for member in node.body]
    methods = {member.name for member in members if isinstance(member, ast.FunctionDef)}
    stored = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for member in members
        for node in ast.walk(member)
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store)
    }
    gives_reward = not is_complete or "reward" in stored or not methods.isdisjoint(REWARDS)
    if "step" in methods:
        missing = [verb for verb in VERBS if verb not in methods and is_complete]
        require(
            not missing,
            f"{where}: class {name} of {file} lacks {' and '.join(missing)}; it needs"
            f" {FORMS['turns']}",
        )
        return EnvironmentFile(file, name, "turns", gives_reward, text)
    require(
        not is_complete or ("reset" in methods and any(map(is_tool, methods))),
        f"{where}: class {name} of {file} is not an environment: it needs {FORMS['turns']}, or"
        f" {FORMS['tools']}",
    )
    return EnvironmentFile(file, name, "tools" if is_complete else None, gives_reward, text)


def is_tool(name: str) -> bool:
    """Whether a method of that name is a tool, in a class of tools."""
    return not name.startswith("_") and name not in (*VERBS, *REWARDS)


def _family(
    node: ast.ClassDef, classes: dict[str, ast.ClassDef]
) -> tuple[list[ast.ClassDef], bool]:
    """A class with the classes of its file that it inherits from, and whether these are all."""
    family, is_complete = [node], True
    for member in family:  # grows during the loop
        for base in member.bases:
            name = ast.unparse(base).rpartition(".")[2]
            if name in classes and classes[name] not in family:
                family.append(classes[name])
            elif name not in (*classes, "object", "Protocol", "Environment", "ABC"):
                is_complete = False
    return family, is_complete
