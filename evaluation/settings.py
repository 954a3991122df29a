"""Settings of the tasks that a model is asked while it trains."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from evaluation.contract import Question, Reading, Task
from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Tasks beside the evaluation of a step."""

    eval_tasks: tuple[str, ...] = ()
    """Tasks (docs/evaluation.md) that evaluations ask too: gsm8k, embedded, ..."""

    eval_task_data: dict[str, str] = field(default_factory=dict)
    """Rows of tasks, as {"gsm8k": "FILE_OR_NAME"}."""

    eval_task_rows: int = 256
    """Questions of each task, at most."""

    eval_task_tokens: int | None = None
    """Longest response to them, in tokens; null takes each task's own."""

    def check_task_rows(self) -> None:
        """Read the rows of the tasks.

        Raises:
            DataError: they can't be read, or lack what they need.
        """
        questions_of(self)


def questions_of(settings: TaskSettings) -> list[tuple[Task, list[Question]]]:
    """Each task, with its questions.

    Raises:
        DataError: rows of a task are missing or wrong.
    """
    from evaluation.tasks import tasks_named

    paths = settings.eval_task_data
    return [
        (task, task.read(Reading(path=paths.get(task.name), limit=settings.eval_task_rows)))
        for task in tasks_named(settings.eval_tasks, paths, setting="eval_task_data")
    ]


def check_tasks(settings: TaskSettings) -> None:
    """Raise ConfigError where a task isn't known, or lacks its rows."""
    paths: Mapping[str, str] = settings.eval_task_data
    if settings.eval_tasks or paths:
        from evaluation.tasks import tasks_named

        tasks_named(settings.eval_tasks, paths, setting="eval_task_data")
    require(
        settings.eval_task_rows > 0,
        f"eval_task_rows must be above 0, got {settings.eval_task_rows}",
    )
    require(
        settings.eval_task_tokens is None or settings.eval_task_tokens > 0,
        f"eval_task_tokens must be above 0 or null, got {settings.eval_task_tokens}",
    )
