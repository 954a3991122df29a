"""Evaluation of a model on tasks, from the command line and during training."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from transformers import PreTrainedModel

from evaluation.config import TaskSettings, load_questions
from evaluation.contract import Grades, Question, Task
from evaluation.figures import compute_metrics
from inference.engine.requests import sample_key
from inference.engine.sampling import make_sampler
from inference.generation import generate_each
from inference.settings import Sampling
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.models.forward.forward import context_length
from pipeline.models.hf.chat import decode_response
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import DataError
from pipeline.system.logs import Progress


def encode_questions(
    questions: Sequence[Question], chat: ChatFormat, *, task: str, context: int
) -> list[list[int]]:
    """Return the questions' token ids, for a model with a context of `context` tokens.

    Raises:
        DataError: a question leaves no room for a response.
    """
    encoded = [chat.encode_prompt(question.messages) for question in questions]
    longest = max(map(len, encoded))
    if longest >= context:
        raise DataError(
            f"the longest prompt of the task {task} has {longest} tokens, but the model's"
            f" context is {context}; lower --shots, or omit the task"
        )
    return encoded


def generate_texts(
    questions: Sequence[Question],
    model: PreTrainedModel,
    chat: ChatFormat,
    sampling: Sampling,
    *,
    task: str,
    num_samples: int = 1,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> list[list[str]]:
    """Generate `num_samples` responses to each question, the same on any number of processes.

    Samples depend only on the seed and the indices of question and sample. All processes must call
    this; each generates a share and gets all responses. `progress` counts this process's share.

    Raises:
        DataError: see `encode_questions`.
    """
    prompts = encode_questions(questions, chat, task=task, context=context_length(model))
    data = current_mesh().data
    # All processes take the same number; the last ones repeat the first questions.
    share = math.ceil(len(prompts) / data.size)
    rows = [(data.rank + i * data.size) % len(prompts) for i in range(share)]
    keys = [(row, sample) for row in rows for sample in range(num_samples)]
    finished = generate_each(
        model,
        [prompts[row] for row, _ in keys],
        make_sampler(sampling, chat.stop_ids),
        max_new_tokens=sampling.max_new_tokens,
        keys=[sample_key(row, sample) for row, sample in keys],
        batch_size=batch_size,
    )
    local: dict[tuple[int, int], str] = {}
    start = time.perf_counter()
    for result in finished:
        local[keys[result.index]] = decode_response(chat.tokenizer, result.response.text_ids)
        if progress is not None:
            progress.update(len(local), {}, seconds=time.perf_counter() - start)
    merged: dict[tuple[int, int], str] = {}
    for responses in data.gather_objects(local):
        merged |= responses
    return [[merged[row, sample] for sample in range(num_samples)] for row in range(len(prompts))]


def grade_responses(
    task: Task, questions: Sequence[Question], responses: Sequence[Sequence[str]]
) -> list[list[Grades]]:
    """Grade the responses to each question."""
    return [
        [task.grade(question, response) for response in texts]
        for question, texts in zip(questions, responses, strict=True)
    ]


Generating = Callable[[], AbstractContextManager[PreTrainedModel]]
"""Provides the current trained model for generation; all processes enter together."""


class TaskEvaluations:
    """Evaluates the configured tasks, if any, with greedy decoding.

    The constructor reads the rows, so that errors in them are reported before training.

    Raises:
        DataError: rows of a task are missing or invalid.
    """

    def __init__(self, settings: TaskSettings, chat: ChatFormat, generating: Generating) -> None:
        self._settings = settings
        self._chat = chat
        self._generating = generating
        self._questions = load_questions(settings)
        self._last_metrics: dict[str, float] | None = None

    def metrics(self) -> dict[str, float]:
        """Compute the model's metrics, such as `gsm8k_strict`, by name; all processes must call it.

        Raises:
            DataError: a question is too long for the model.
        """
        if not self._questions:
            return {}
        self._last_metrics = {}
        with self._generating() as model:
            for task, questions in self._questions:
                max_new_tokens = self._settings.eval_task_tokens or task.max_new_tokens
                sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0.0)
                responses = generate_texts(questions, model, self._chat, sampling, task=task.name)
                grades = grade_responses(task, questions, responses)
                task_metrics = compute_metrics(task.name, grades, (1,))
                self._last_metrics |= {metric.name: metric.value for metric in task_metrics}
        return dict(self._last_metrics)

    def summary(
        self, before: Mapping[str, float], *, changed: bool
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Return the tasks' entries of `eval` (none without tasks); all processes must call this.

        Args:
            before: the metrics of the model that the step began with.
            changed: whether the model has changed since the last evaluation.

        Returns:
            `tasks`: each metric's value `before` and `after`, and the number of `questions`.
        """
        if not self._questions:
            return {}
        after = self.metrics() if changed or self._last_metrics is None else self._last_metrics
        count = {task.name: len(questions) for task, questions in self._questions}
        return {
            "tasks": {
                name: {
                    "before": before[name],
                    "after": value,
                    "questions": count[name.partition("_")[0]],
                }
                for name, value in after.items()
            }
        }
