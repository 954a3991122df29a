"""A model on a task: its answers, graded, as figures."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from evaluation.answering import Chat, answers_to
from evaluation.contract import Question, Task
from evaluation.figures import Figure, figures_of
from inference.settings import Sampling


def evaluate(
    task: Task,
    questions: Sequence[Question],
    model: PreTrainedModel,
    chat: Chat,
    sampling: Sampling,
    *,
    ks: Sequence[int] = (1,),
    num_samples: int = 1,
    batch_size: int = 32,
) -> list[Figure]:
    """The figures of a model's answers to the questions of a task, the same on all processes.

    Args:
        task: grades the answers.
        questions: what `task.read` gave.
        model: in evaluation mode.
        chat: its tokenizer and chat format.
        sampling: how answers are drawn.
        ks: of pass@k, none larger than `num_samples`.
        num_samples: answers to each question.
        batch_size: sequences in a batch; changes no figure.

    Raises:
        DataError: a question is too long for the model.
    """
    answers = answers_to(
        questions,
        model,
        chat,
        sampling,
        task=task.name,
        num_samples=num_samples,
        batch_size=batch_size,
    )
    grades = [
        [task.grade(question, answer) for answer in of_question]
        for question, of_question in zip(questions, answers, strict=True)
    ]
    return figures_of(task.name, grades, ks)
