"""A user's environment, read from its file without running it.

So a missing class or method is reported before any model is loaded. The text that was read is also
what runs: editing the file during a run has no effect.
"""

import ast
import re
from dataclasses import dataclass

from pipeline.system.errors import require
from pipeline.system.installation import ROOT
from rewards.functions import UserFile, optional_parameters, read_definition

VERBS = ("reset", "step", "reward")
"""The methods of an environment, which are described in docs/environments.md."""

BUILT_IN = {"calculator": "tools.py:Calculator"}
"""Built-in environments, by short name."""

REWARDS = ("get_reward", "reward")
"""Names of the reward in a tool class: methods; the second may also be an attribute."""

FORMS = {
    "turns": "reset(self, row, *, seed), step(self, response) and reward(self)",
    "tools": "reset(self, **row) and public methods with docstrings as tools",
}


@dataclass(frozen=True)
class EnvironmentFile(UserFile):
    """A class, read from its file."""

    gives_reward: bool
    """Whether the class defines a reward; for tools, a function may provide it instead."""

    columns: frozenset[str]
    """Columns of the rows that its `reset` requires."""


def read_environment(path: str) -> EnvironmentFile:
    """The class that `path` names, as FILE.py:CLASS or one of `BUILT_IN`.

    Raises:
        ConfigError: the file or class doesn't exist, is not Python, or lacks a method.
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
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    stored = re.search(r"\breward\b[^=\n]* = ", ast.unparse(node))
    gives_reward = bool(stored) or not methods.keys().isdisjoint(REWARDS)
    missing = [verb for verb in VERBS if verb not in methods]
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
    columns = _columns(reset, takes_row="step" in methods) if reset else frozenset[str]()
    return EnvironmentFile(file.file, file.name, file.text, gives_reward, columns)


def _columns(reset: ast.FunctionDef, *, takes_row: bool) -> frozenset[str]:
    """The parameters of a tool class's `reset` without a default, and keys that index the row."""
    given, text = reset.args, ast.unparse(reset)
    row = next((each.arg for each in (given.args[1:2] if takes_row else [given.kwarg]) if each), "")
    is_guarded = "try:" in text or f" in {row}" in text
    needed = set[str]() if is_guarded else {*re.findall(rf"\b{row}\['(\w+)'\]", text)}
    if not takes_row:
        parameters = {each.arg for each in (*given.args[1:], *given.kwonlyargs)}
        needed |= parameters - optional_parameters(given)
    return frozenset(needed - {"seed", "dialogue"})


def is_tool(name: str) -> bool:
    """Whether the method of a tool class with this name is a tool."""
    return not name.startswith("_") and name not in (*VERBS, *REWARDS)
