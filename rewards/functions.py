"""User's reward functions: read without running them, and called in worker processes."""

import ast
import asyncio
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.examples import Message
from pipeline.errors import ConfigError, suggestion
from rewards.config import Form, RewardConfig
from rewards.contract import Episode, Outcome, Scorer, member, of_error, outcome_of, outcomes_of

ALL_COLUMNS = "*"
"""Stands for all columns of a row, where a function may read any."""

FORMS: dict[str, str] = {
    "episodes": "(episodes)",
    "trl": "TRL's (prompts, completions, **columns), with text",
    "trl_conversational": "TRL's (prompts, completions, **columns), with messages",
    "openrlhf": "OpenRLHF's (queries, prompts, labels)",
    "verl": "verl's (data_source, solution_str, ground_truth, extra_info)",
}

_GIVEN = {
    "episodes": {"episodes"},
    "trl": {"prompts", "completions"},
    "openrlhf": {"queries", "prompts", "labels"},
    "verl": {"data_source", "solution_str", "ground_truth", "extra_info"},
}
"""Parameters by form that are no columns."""

_TRAINERS_OWN = {
    *("completion_ids", "completions_ids", "prompt_ids", "trainer_state", "environments"),
    *("log_extra", "log_metric"),
}
"""What TRL's trainer also passes, and no function here gets."""


@dataclass(frozen=True)
class FunctionFile:
    """A function as its file has it."""

    file: str
    name: str
    form: Form
    """Never auto."""

    parameters: tuple[str, ...]
    takes_any: bool
    """Whether it has **parameters."""

    columns: frozenset[str]
    """Columns of the rows that it reads; `ALL_COLUMNS` where it may read any."""

    text: str

    @property
    def sha256(self) -> str:
        """The hash of the whole file."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_function(config: RewardConfig) -> FunctionFile:
    """The function that `config.path` names.

    Raises:
        ConfigError: no such file or function, no Python, or parameters of no known form.
    """
    where = f"rewards.{config.name}.path"
    file, colon, name = (config.path or "").rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigError(f"{where} must be file.py:function, got {config.path}")
    text = read_text(Path(file), where)
    tree = parse_python(text, file, where)
    found = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if name not in found:
        raise ConfigError(
            f"{where}: {file} has no `def {name}` at its top level; {suggestion(name, found)}"
        )
    return _described(found[name], tree, config, file=file, text=text)


def parse_python(text: str, file: str, where: str) -> ast.Module:
    """The text of a user's file as Python; `where` is the setting that names the file.

    Raises:
        ConfigError: it is none.
    """
    try:
        return ast.parse(text, filename=file)
    except SyntaxError as error:
        raise ConfigError(
            f"{where}: {file} line {error.lineno} is not valid Python ({error.msg})"
        ) from None


def read_text(path: Path, where: str) -> str:
    """The text of a file that a setting names; `where` is that setting."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{where}: there is no file {path}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: {path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{where}: {path} can't be read ({error.strerror})") from None


def _described(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    tree: ast.Module,
    config: RewardConfig,
    *,
    file: str,
    text: str,
) -> FunctionFile:
    arguments = node.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    optional = set(positional[len(positional) - len(arguments.defaults) :])
    optional |= {
        each.arg
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    }
    names = (*positional, *(each.arg for each in arguments.kwonlyargs))
    code = _reached(node, tree)
    form = _form(set(names), code) if config.form == "auto" else config.form
    family = (form or "").partition("_")[0]
    unknown = sorted(set(names) - optional - _GIVEN.get(family, set()))
    if family == "trl":
        unknown = [each for each in unknown if each in _TRAINERS_OWN]
    if form is None or unknown or arguments.posonlyargs:
        raise ConfigError(
            f"rewards.{config.name}.path: {node.name}({', '.join(names)}) of {file} has parameters"
            f" that no form of reward function has{_naming(unknown)}; write (episodes), or use"
            f" {', '.join(FORMS[each] for each in ('trl', 'openrlhf', 'verl'))}"
        )
    any_name = arguments.kwarg.arg if arguments.kwarg else None
    columns = _columns(family, names, optional, any_name, code)
    if family in ("openrlhf", "verl"):
        columns.add(config.column or ("label" if family == "openrlhf" else "ground_truth"))
    elif config.column is not None:
        columns.add(config.column)
    return FunctionFile(
        file, node.name, form, names, any_name is not None, frozenset(columns), text
    )


def _naming(unknown: Collection[str]) -> str:
    return f" ({', '.join(unknown)})" if unknown else ""


def _reached(node: ast.stmt, tree: ast.Module) -> ast.Module:
    """The function, first, and what it uses of its file, by name."""
    defined: dict[str, ast.stmt] = {}
    for each in tree.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined[each.name] = each
        elif isinstance(each, ast.Assign):
            defined |= {name.id: each for name in each.targets if isinstance(name, ast.Name)}
    reached = [node]
    for statement in reached:  # which grows meanwhile
        used = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
        reached += [
            defined[name] for name in sorted(used & defined.keys()) if defined[name] not in reached
        ]
    return ast.Module(reached, [])


def _form(names: Collection[str], code: ast.Module) -> Form | None:
    """The form of a function by the names of its parameters; None where they fit none."""
    if "episodes" in names:
        return "episodes"
    if {"queries", "labels"} <= set(names):
        return "openrlhf"
    if "solution_str" in names:
        return "verl"
    if "completions" not in names:
        return None
    # Functions for messages read the text as completion[0]["content"].
    reads_messages = any(
        isinstance(node, ast.Constant) and node.value == "content" for node in ast.walk(code)
    )
    return "trl_conversational" if reads_messages else "trl"


def _columns(
    family: str,
    names: Collection[str],
    optional: Collection[str],
    any_name: str | None,
    code: ast.Module,
) -> set[str]:
    """The columns of the rows that a function reads."""
    if family == "episodes":
        return set(_keys(code, _is_extra))
    if family == "verl":
        return {"data_source", "extra_info"} & set(names)
    if family != "trl":
        return set()
    columns = set(names) - _GIVEN["trl"] - (_TRAINERS_OWN & set(optional))
    if any_name is not None:
        columns |= set(
            _keys(code.body[0], lambda each: isinstance(each, ast.Name) and each.id == any_name)
        )
    return columns


def _is_extra(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "extra"


def _keys(tree: ast.AST, is_mapping: Callable[[ast.AST], bool]) -> Iterator[str]:
    """Keys that code reads from a mapping: m["key"], m.get("key"); ALL_COLUMNS for other uses."""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if not is_mapping(node):
            continue
        above = parents.get(node)
        key: ast.AST | None = None
        if isinstance(above, ast.Subscript):
            key = above.slice
        elif isinstance(above, ast.Compare) and above.comparators == [node]:
            key = above.left
        elif isinstance(above, ast.Attribute) and above.attr == "get":
            call = parents.get(above)
            key = call.args[0] if isinstance(call, ast.Call) and call.args else None
        value = key.value if isinstance(key, ast.Constant) else None
        yield value if isinstance(value, str) else ALL_COLUMNS


Function = Callable[..., Any]


def load_function(file: FunctionFile) -> Function:
    """The function, from the text that was read when the run began.

    Raises:
        Exception: whatever the file's own code raises.
    """
    return load_name(file.file, file.text, file.name)


def load_name(file: str, text: str, name: str) -> Any:  # noqa: ANN401
    """What a file's text defines under a name; `file` is where it came from."""
    path = Path(file).expanduser().resolve()
    sys.path.insert(0, str(path.parent))
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    # Dataclasses and pickling look their module up by its name.
    sys.modules.setdefault(path.stem, module)
    exec(compile(text, str(path), "exec"), module.__dict__)  # noqa: S102
    return getattr(module, name)


def function_scorer(file: FunctionFile, column: str | None) -> Scorer:
    """Scores episodes by a user's function: verl's one by one, the other forms all at once."""
    function = load_function(file)
    if file.form == "verl":
        return Scorer(lambda episodes: [_verl(function, file, column, each) for each in episodes])

    arguments = {
        "episodes": _ours,
        "trl": _trl,
        "trl_conversational": _trl,
        "openrlhf": _openrlhf,
    }[file.form]

    def score(episodes: Sequence[Episode]) -> list[Outcome]:
        try:
            returned = _finished(function(**arguments(file, column, episodes)))
        except Exception as error:  # noqa: BLE001 - whatever a user's code raises
            return of_error(error, len(episodes))
        if file.form == "openrlhf":
            returned = member(returned, ("rewards", "scores"))
        return outcomes_of(returned, len(episodes))

    return Scorer(score, batched=True)


def _finished(returned: Any) -> Any:  # noqa: ANN401
    """The result of an async function, which runs on a loop of its own; others as they are."""
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:  # noqa: ANN401
        return await returned

    return asyncio.run(wait())


def _ours(file: FunctionFile, column: str | None, episodes: Sequence[Episode]) -> dict[str, Any]:
    del file, column
    return {"episodes": list(episodes)}


def _trl(file: FunctionFile, column: str | None, episodes: Sequence[Episode]) -> dict[str, Any]:
    del column
    if file.form == "trl_conversational":
        given: dict[str, Any] = {
            "prompts": [_messages(each.prompt) for each in episodes],
            "completions": [
                _messages((*each.turns, Message("assistant", each.response))) for each in episodes
            ],
        }
    else:
        given = {
            "prompts": [prompt_text(each.prompt) for each in episodes],
            "completions": [each.response for each in episodes],
        }
    columns = set(file.columns)
    if ALL_COLUMNS in columns:
        columns |= {name for each in episodes for name in each.extra}
    for name in columns - {ALL_COLUMNS} - given.keys():
        given[name] = [each.extra.get(name) for each in episodes]
    return given if file.takes_any else _accepted(file, given)


def _openrlhf(
    file: FunctionFile, column: str | None, episodes: Sequence[Episode]
) -> dict[str, Any]:
    prompts = [prompt_text(each.prompt) for each in episodes]
    given = {
        "queries": [prompt + each.response for prompt, each in zip(prompts, episodes, strict=True)],
        "prompts": prompts,
        "labels": [each.extra.get(column or "label") for each in episodes],
    }
    return _accepted(file, given)


def _verl(function: Function, file: FunctionFile, column: str | None, episode: Episode) -> Outcome:
    given = {
        "data_source": episode.extra.get("data_source"),
        "solution_str": episode.response,
        "ground_truth": episode.extra.get(column or "ground_truth"),
        "extra_info": episode.extra.get("extra_info"),
    }
    try:
        returned = _finished(function(**_accepted(file, given)))
    except Exception as error:  # noqa: BLE001 - whatever a user's code raises
        return of_error(error, 1)[0]
    return outcome_of(member(returned, ("score",)))


def _accepted(file: FunctionFile, given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in file.parameters}


def prompt_text(prompt: Sequence[Message]) -> str:
    """A prompt as plain text: its turns, with a blank line between them."""
    return "\n\n".join(message.content for message in prompt)


def _messages(turns: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in turns]
