"""Tasks that a step's model was asked: their figures before and after, with intervals."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.report.intervals import share_interval
from pipeline.report.results import StepResult, finite

SHOWN = 2
"""Curves of a task in the report: its first metrics."""


@dataclass(frozen=True)
class TaskFigure:
    """One share of right answers of a step's model."""

    name: str
    """`gsm8k_strict`: the task and the metric."""

    before: float
    after: float
    questions: int

    @property
    def title(self) -> str:
        """`gsm8k, strict`."""
        task, _, metric = self.name.partition("_")
        return f"{task}, {metric.replace('_', ' ')}"

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `after` (Wilson 1927)."""
        return share_interval(self.after * self.questions, self.questions)


def task_figures(step: StepResult) -> list[TaskFigure]:
    """The figures of a step's tasks, in their order; empty where it has none."""
    tasks = step.eval.get("tasks")
    found: list[TaskFigure] = []
    for name, figure in tasks.items() if isinstance(tasks, Mapping) else ():
        numbers = [finite(figure.get(each)) for each in ("before", "after", "questions")]
        before, after, questions = numbers
        if before is not None and after is not None and questions:
            found.append(TaskFigure(str(name), before, after, int(questions)))
    return found


def task_curves(step: StepResult) -> dict[str, dict[str, str]]:
    """The metrics whose curves the report draws, with what the curves are called, by task."""
    curves: dict[str, dict[str, str]] = {}
    for figure in task_figures(step):
        task, _, metric = figure.name.partition("_")
        of_task = curves.setdefault(task, {})
        if len(of_task) < SHOWN:
            of_task[f"eval_{figure.name}"] = metric.replace("_", " ")
    return curves
