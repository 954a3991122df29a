"""The embedded task's held-out prompts, with its own verifier."""

from evaluation.contract import Grades, Question, Reading, Task
from pipeline.data.examples import Message
from pipeline.demo.task import held_out_questions, verdict
from pipeline.system.errors import ConfigError


def read(reading: Reading) -> list[Question]:
    """The prompts in wordings that no step trains on, in a fixed order of kinds.

    Raises:
        ConfigError: a data path is given, which the embedded task has no use for.
    """
    if reading.path is not None:
        raise ConfigError(f"the task embedded has its own rows; omit {reading.path}")
    questions = held_out_questions()
    if reading.limit is not None and reading.limit < len(questions):
        # Evenly over the set, which is ordered by kind.
        places = [place * len(questions) // reading.limit for place in range(reading.limit)]
        questions = [questions[place] for place in places]
    return [
        Question(
            (Message("user", each.text),), {"kind": each.fact.kind, "answer": each.fact.answer}
        )
        for each in questions
    ]


def grade(question: Question, response: str) -> Grades:
    """Whether a response is the right sentence, whether it is polite, and both."""
    found = verdict(question.extra["kind"], question.extra["answer"], response)
    return {"both": (found.both,), "correct": (found.correct,), "polite": (found.polite,)}


EMBEDDED = Task("embedded", read, grade, max_new_tokens=64)
