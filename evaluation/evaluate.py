"""A model on a task: its responses, graded, as figures."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from evaluation.contract import Question, Task
from evaluation.figures import Figure, figures_of
from evaluation.responding import Chat, responses_to
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
    """The figures of a model's responses to the questions of a task, the same on all processes.

    Args:
        task: grades the responses.
        questions: what `task.read` gave.
        model: in evaluation mode.
        chat: its tokenizer and chat format.
        sampling: how responses are drawn.
        ks: of pass@k, none larger than `num_samples`.
        num_samples: responses to each question.
        batch_size: sequences in a batch; changes no figure.

    Raises:
        DataError: a question is too long for the model.
    """
    responses = responses_to(
        questions,
        model,
        chat,
        sampling,
        task=task.name,
        num_samples=num_samples,
        batch_size=batch_size,
    )
    grades = [
        [task.grade(question, response) for response in of_question]
        for question, of_question in zip(questions, responses, strict=True)
    ]
    return figures_of(task.name, grades, ks)
