"""User reward functions: read without being executed, and called in worker processes."""

import ast
import asyncio
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config import find_column
from pipeline.data.examples import Message
from pipeline.system.errors import ConfigError, suggestion
from rewards.config import Form, RewardConfig
from rewards.contract import Episode, Outcome, Scorer, parse_outcomes

FORMS: dict[str, str] = {
    "episodes": "(episodes)",
    "trl": "TRL's (prompts, completions, **columns), with text",
    "trl_conversational": "TRL's (prompts, completions, **columns), with messages",
    "openrlhf": "OpenRLHF's (queries, prompts, labels)",
    "verl": "verl's (data_source, solution_str, ground_truth, extra_info)",
}

_FORM_PARAMETERS = {
    "episodes": {"episodes"},
    "trl": {"prompts", "completions"},
    "openrlhf": {"queries", "prompts", "labels"},
    "verl": {"data_source", "solution_str", "ground_truth", "extra_info"},
}
"""Parameters by form, without TRL's columns."""

_ANSWER_COLUMNS = {"openrlhf": {"labels": "label"}, "verl": {"ground_truth": "ground_truth"}}
"""By form, the parameter whose column the setting `column` selects, and the default column."""

_COMPUTED_PARAMETERS = {"episodes", "prompts", "completions", "queries", "solution_str"}
"""Parameters whose values are not columns of the rows."""

_FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)

Definition = TypeVar("Definition", bound=ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)

_TRL_TRAINER_ARGUMENTS = {
    *("completion_ids", "completions_ids", "prompt_ids", "trainer_state", "environments"),
    *("log_extra", "log_metric"),
}
"""Arguments that TRL's trainer passes to functions, but this project doesn't."""


@dataclass(frozen=True)
class UserFile:
    """A function or class in a user's file; it runs from the text that was read at startup."""

    file: str
    name: str
    text: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def load(self) -> Any:  # noqa: ANN401
        """Run the file's text and return the object with that name.

        Raises:
            Exception: any exception that the file's code raises.
        """
        path = Path(self.file).expanduser().resolve()
        sys.path.insert(0, str(path.parent))
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        # Dataclasses and pickle look up their module by name.
        sys.modules.setdefault(path.stem, module)
        exec(compile(self.text, str(path), "exec"), module.__dict__)  # noqa: S102
        return getattr(module, self.name)


@dataclass(frozen=True)
class FunctionFile(UserFile):
    """A function, read from its file."""

    form: Form
    """The form that was set or detected; never auto."""

    parameters: tuple[str, ...]
    optional: frozenset[str]
    """Parameters with a default."""

    required: tuple[str, ...]
    """Parameters without a default that the function's code reads and that columns provide."""

    has_kwargs: bool
    """Whether the function accepts arbitrary keyword arguments (**kwargs)."""

    def column(self, parameter: str, config: RewardConfig) -> str:
        """Return the name of the column whose values a parameter receives."""
        default = _ANSWER_COLUMNS.get(self.form, {}).get(parameter)
        return parameter if default is None else config.column or default


def read_definition(
    path: str, where: str, kinds: tuple[type[Definition], ...]
) -> tuple[UserFile, Definition]:
    """Read the function or class at FILE.py:NAME, without running the file.

    Args:
        path: the path, FILE.py:NAME.
        where: name of the setting that contains the path, for error messages.
        kinds: allowed AST node types of the definition.

    Raises:
        ConfigError: the file or definition doesn't exist, or the file is not valid Python.
    """
    keyword = "class" if ast.ClassDef in kinds else "def"
    file, colon, name = path.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{where} must be FILE.py:NAME, got {path}")
    text = read_text(Path(file), where)
    try:
        tree = ast.parse(text, filename=file)
    except SyntaxError as error:
        raise ConfigError(
            f"{where}: {file} line {error.lineno} is not valid Python ({error.msg})"
        ) from None
    definitions = {node.name: node for node in tree.body if isinstance(node, kinds)}
    if name not in definitions:
        raise ConfigError(
            f"{where}: {file} has no `{keyword} {name}` at its top level;"
            f" {suggestion(name, definitions)}"
        )
    return UserFile(file, name, text), definitions[name]


def read_text(path: Path, where: str) -> str:
    """Read the text file that the setting `where` names."""
    try:
        return path.expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {path} can't be read as UTF-8 text ({error})") from None


def read_function(config: RewardConfig) -> FunctionFile:
    """Read the function that `config.path` names.

    Raises:
        ConfigError: the file or function doesn't exist, the file is not valid Python, or the
            function's parameters match no form.
    """
    where = f"rewards.{config.name}.path"
    file, node = read_definition(config.path or "", where, _FUNCTION_NODES)
    arguments = node.args
    names = tuple(argument.arg for argument in (*arguments.args, *arguments.kwonlyargs))
    optional = optional_parameters(arguments)
    form = _detect_form(set(names), node) if config.form == "auto" else config.form
    family = (form or "").partition("_")[0]
    unknown = set(names) - optional - _FORM_PARAMETERS.get(family, set())
    if family == "trl":
        unknown &= _TRL_TRAINER_ARGUMENTS
    if form is None or unknown or arguments.posonlyargs:
        raise ConfigError(
            f"{where}: {node.name}({', '.join(names)}) in {file.file} has parameters that no reward"
            f" function interface defines ({', '.join(sorted(unknown)) or 'all'}); declare"
            f" {node.name}(episodes), or use"
            f" {', '.join(FORMS[form] for form in ('trl', 'openrlhf', 'verl'))}"
        )
    used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    required = tuple(name for name in names if name in used - optional - _COMPUTED_PARAMETERS)
    if family == "trl" and arguments.kwarg:
        text, kwarg = ast.unparse(node), arguments.kwarg.arg
        # A function with `try` or `in` may handle a missing column.
        if not re.search(rf"try:| in {kwarg}\b(?!\[|\.pop)", text):
            columns = re.findall(rf"\b{kwarg}(?:\[|\.pop\()'(\w+)'[\])]", text)
            required += tuple(sorted({*columns} - _TRL_TRAINER_ARGUMENTS))
    fields = (form, names, frozenset(optional), required, arguments.kwarg is not None)
    return FunctionFile(file.file, file.name, file.text, *fields)


def optional_parameters(signature: ast.arguments) -> set[str]:
    """Return the names of the parameters that have a default."""
    positional = zip(reversed(signature.args), reversed(signature.defaults), strict=False)
    pairs = [*positional, *zip(signature.kwonlyargs, signature.kw_defaults, strict=True)]
    return {argument.arg for argument, default in pairs if default is not None}


def _detect_form(names: Collection[str], function: ast.stmt) -> Form | None:
    """Detect the form of a function from its parameter names; return None if no form matches."""
    if "episodes" in names:
        return "episodes"
    if {"queries", "labels"} <= set(names):
        return "openrlhf"
    if "solution_str" in names:
        return "verl"
    if "completions" not in names:
        return None
    # Functions that take messages read completion[0]["content"].
    constants = (node.value for node in ast.walk(function) if isinstance(node, ast.Constant))
    return "trl_conversational" if "content" in constants else "trl"


def function_scorer(file: FunctionFile, config: RewardConfig) -> Scorer:
    """Return a scorer that passes a user's function all episodes or, in verl's form, one."""
    function = file.load()
    family = file.form.partition("_")[0]
    result_keys = {"openrlhf": ("rewards", "scores"), "verl": ("score",)}.get(family, ())

    def score(episodes: Sequence[Episode]) -> list[Outcome]:
        arguments = _make_arguments(file, config, episodes)
        if not file.has_kwargs:
            arguments = {name: arguments[name] for name in file.parameters if name in arguments}
        result = function(**arguments)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        if isinstance(result, Mapping):
            result = next((result[name] for name in result_keys if name in result), result)
        return parse_outcomes([result] if family == "verl" else result, len(episodes))

    return score


def _make_arguments(
    file: FunctionFile, config: RewardConfig, episodes: Sequence[Episode]
) -> dict[str, Any]:
    if file.form == "episodes":
        return {"episodes": list(episodes)}
    family = file.form.partition("_")[0]
    names = (
        {*_FORM_PARAMETERS[family], *file.parameters}
        - _TRL_TRAINER_ARGUMENTS
        - _COMPUTED_PARAMETERS
    )
    if family == "trl":  # TRL passes every column of the rows
        names |= {name for episode in episodes for name in episode.extra}
    columns = {
        name: [find_column(episode.extra, file.column(name, config)) for episode in episodes]
        for name in names
    }
    for name in file.optional:  # keep the default if no row has the column
        if all(value is None for value in columns.get(name, ())):
            columns.pop(name, None)
    prompts = [prompt_text(episode.prompt) for episode in episodes]
    responses = [episode.response for episode in episodes]
    if file.form == "verl":
        return {name: value for name, (value,) in columns.items()} | {"solution_str": responses[0]}
    if file.form == "openrlhf":
        queries = [p + response for p, response in zip(prompts, responses, strict=True)]
        return {**columns, "queries": queries, "prompts": prompts}
    if file.form == "trl":
        return {**columns, "prompts": prompts, "completions": responses}
    dialogues = [
        (episode.prompt, (*episode.turns, Message("assistant", episode.response)))
        for episode in episodes
    ]
    return {
        **columns,
        "prompts": [[message.turn for message in prompt] for prompt, _ in dialogues],
        "completions": [[message.turn for message in completion] for _, completion in dialogues],
    }


def prompt_text(prompt: Sequence[Message]) -> str:
    """Return a prompt as plain text: its turns, separated by blank lines."""
    return "\n\n".join(message.content for message in prompt)
