"""A user's environment, read from its file without running it.

A missing class or method is therefore reported before any model is loaded. Workers execute the text
that was read at startup, so editing the file during a run has no effect.
"""

import ast
import re
from dataclasses import dataclass

from pipeline.system.errors import require
from pipeline.system.installation import ROOT
from rewards.functions import UserFile, optional_parameters, read_definition

METHODS = ("reset", "step", "reward")
"""The methods of an environment; see docs/environments.md."""

BUILT_IN = {"calculator": "tools.py:Calculator"}
"""Built-in environments, by short name."""

REWARD_NAMES = ("get_reward", "reward")
"""Methods of a tool class that return its reward; the second may also be an attribute."""

FORMS = {
    "turns": "reset(self, row, *, seed), step(self, response) and reward(self)",
    "tools": "reset(self, **row) and public methods with docstrings as tools",
}


@dataclass(frozen=True)
class EnvironmentFile(UserFile):
    """A class, read from its file."""

    defines_reward: bool
    """Whether the class defines a reward; for tools, another source may provide it instead."""

    columns: frozenset[str]
    """Columns that `reset` requires in a row."""


def read_environment(path: str) -> EnvironmentFile:
    """Read the class that `path` names, as FILE.py:CLASS or one of `BUILT_IN`.

    Raises:
        ConfigError: the file or class doesn't exist, is not valid Python, or lacks a method.
    """
    where = "ppo.environment"
    if ":" not in path:
        require(
            path in BUILT_IN,
            f"{where} must be FILE.py:CLASS or {' or '.join(BUILT_IN)}, got {path}",
        )
        path = str(ROOT / "rewards" / "environments" / BUILT_IN[path])
    file, node = read_definition(path, where, (ast.ClassDef,))
    if node.bases:  # checked when its workers start
        return EnvironmentFile(file.file, file.name, file.text, True, frozenset())
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    assigns_reward = re.search(r"\breward\b[^=\n]* = ", ast.unparse(node))
    defines_reward = bool(assigns_reward) or not methods.keys().isdisjoint(REWARD_NAMES)
    missing = [name for name in METHODS if name not in methods]
    subject = f"{where}: class {file.name} of {file.file}"
    require(
        not ("step" in methods and missing),
        f"{subject} lacks {' and '.join(missing)}; it needs {FORMS['turns']}",
    )
    require(
        "step" in methods or ("reset" in methods and any(map(is_tool, methods))),
        f"{subject} is not an environment: it needs {FORMS['turns']}, or {FORMS['tools']}",
    )
    reset = methods.get("reset")
    columns = _required_columns(reset, takes_row="step" in methods) if reset else frozenset[str]()
    return EnvironmentFile(file.file, file.name, file.text, defines_reward, columns)


def _required_columns(reset: ast.FunctionDef, *, takes_row: bool) -> frozenset[str]:
    """Return the columns that `reset` indexes, and for tools also its required parameters."""
    signature, text = reset.args, ast.unparse(reset)
    row_arguments = signature.args[1:2] if takes_row else [signature.kwarg]
    row = next((argument.arg for argument in row_arguments if argument), "")
    is_guarded = "try:" in text or f" in {row}" in text
    required = set[str]() if is_guarded else {*re.findall(rf"\b{row}\['(\w+)'\]", text)}
    if not takes_row:
        parameters = {argument.arg for argument in (*signature.args[1:], *signature.kwonlyargs)}
        required |= parameters - optional_parameters(signature)
    return frozenset(required - {"seed", "dialogue"})


def is_tool(name: str) -> bool:
    """Return whether a tool class's method of this name is a tool."""
    return not name.startswith("_") and name not in (*METHODS, *REWARD_NAMES)
