"""The tasks, by name."""

from collections.abc import Mapping, Sequence

from evaluation.arithmetic import ARITHMETIC
from evaluation.contract import Task
from evaluation.embedded import EMBEDDED
from evaluation.gsm8k import GSM8K
from evaluation.ifeval.task import IFEVAL
from pipeline.system.errors import ConfigError, require, suggestion

TASKS = {task.name: task for task in (GSM8K, IFEVAL, EMBEDDED, ARITHMETIC)}


def tasks_named(names: Sequence[str], paths: Mapping[str, str], *, setting: str) -> list[Task]:
    """The tasks of these names.

    Args:
        names: of tasks.
        paths: data paths, by the name of the task that reads them.
        setting: in which the paths stand, for error messages.

    Raises:
        ConfigError: there is no such task, one is named twice, or one lacks its data path.
    """
    for name in (*names, *paths):
        if name not in TASKS:
            raise ConfigError(f"there is no task {name}; {suggestion(name, TASKS)}")
    for name in paths:
        require(name in names, f"{setting} {name}=...: the task {name} is not among the tasks")
    for name in names:
        require(names.count(name) == 1, f"the task {name} is named twice; name it once")
        require(
            name in paths or not TASKS[name].needs_path,
            f"the task {name} has no rows of its own; give a file or Hub name as"
            f" {setting} {name}=PATH",
        )
    return [TASKS[name] for name in names]


def paths_in(words: Sequence[str], *, setting: str) -> dict[str, str]:
    """Data paths by task, of words `gsm8k=rows.jsonl`.

    Raises:
        ConfigError: a word is none of that form.
    """
    paths: dict[str, str] = {}
    for word in words:
        task, equals, path = word.partition("=")
        require(
            bool(task and equals and path),
            f"{setting} {word}: give the task and its rows, as gsm8k=rows.jsonl",
        )
        paths[task] = path
    return paths
