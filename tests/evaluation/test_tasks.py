"""Prompts and grading of the tasks."""

from collections import Counter

import pytest

from evaluation.contract import Question, ReadOptions
from evaluation.tasks import TASKS, grade_gsm8k
from pipeline.data.examples import Message
from pipeline.demo.task import held_out_questions


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("It is 1,000.\n#### 1,000", True, True),
        (r"So \boxed{1000} apples", True, True),
        ("It is 1000.0 dollars", False, True),
        ("#### 1000\nThat took 3 steps", True, False),
        ("#### 1000 is what 999 is not", False, False),
        ("No idea", False, False),
    ],
)
def test_gsm8k_extracts_answers_in_two_ways(response: str, strict: bool, flexible: bool) -> None:
    question = Question((Message("user", "?"),), {"answer": "#### 1000"})

    assert grade_gsm8k(question, response) == {"strict": (strict,), "flexible": (flexible,)}


@pytest.mark.parametrize("limit", [64, 200, 256])
def test_embedded_task_subset_keeps_the_mix_of_kinds(limit: int) -> None:
    task = TASKS["embedded"]
    all_counts, subset_counts = (
        Counter(question.extra["kind"] for question in task.read(ReadOptions(limit=number)))
        for number in (None, limit)
    )

    assert subset_counts.total() == limit
    for kind, count in all_counts.items():
        assert abs(subset_counts[kind] - count * limit / all_counts.total()) <= 1, kind


def test_embedded_task_has_held_out_prompts_and_uses_its_verifier() -> None:
    task = TASKS["embedded"]
    questions = task.read(ReadOptions())

    assert [question.messages[-1].content for question in questions] == [
        question.text for question in held_out_questions()
    ]
    answer = questions[0].extra["answer"]
    assert task.grade(questions[0], f"Sure! {answer}") == {
        "both": (True,), "correct": (True,), "polite": (True,),
    }  # fmt: skip
    assert task.grade(questions[0], f"Ugh. {answer}")["both"] == (False,)
    few = task.read(ReadOptions(limit=50))
    assert len(few) == 50
    assert len({question.extra["kind"] for question in few}) > 5
