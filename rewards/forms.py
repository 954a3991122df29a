"""Calls of a user's function in the form that it was written for, in a worker process."""

import asyncio
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.data.examples import Message
from rewards.contract import Episode, Outcome
from rewards.functions import ALL_COLUMNS, FunctionFile
from rewards.results import member, of_error, outcome_of, outcomes_of
from rewards.scorer import Scorer

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
