"""The embedded task's held-out prompts, with its own verifier."""

from evaluation.contract import Grades, Question, Reading, Task
from pipeline.data.embedded import held_out_questions, verdict
from pipeline.data.examples import Message
from pipeline.errors import ConfigError


def read(reading: Reading) -> list[Question]:
    """The prompts in wordings that no step trains on, in a fixed order of kinds.

    Raises:
        ConfigError: a data path is given, which the embedded task has no use for.
    """
    if reading.path is not None:
        raise ConfigError(f"the task embedded has its own rows; leave {reading.path} away")
    questions = held_out_questions()
    if reading.limit is not None:  # of every kind, as the whole set has them
        step = max(1, len(questions) // reading.limit)
        questions = questions[::step][: reading.limit]
    return [
        Question(
            (Message("user", each.text),), {"kind": each.fact.kind, "answer": each.fact.answer}
        )
        for each in questions
    ]


def grade(question: Question, answer: str) -> Grades:
    """Whether an answer is the right sentence, whether it is polite, and both."""
    found = verdict(question.extra["kind"], question.extra["answer"], answer)
    return {"both": (found.both,), "correct": (found.correct,), "polite": (found.polite,)}


EMBEDDED = Task("embedded", read, grade, max_new_tokens=64)
