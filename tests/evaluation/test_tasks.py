"""Prompts and grading of the tasks."""

import json
from collections import Counter
from pathlib import Path

import pytest

from evaluation.contract import Question, Reading
from evaluation.tasks import TASKS, grade_gsm8k
from pipeline.data.examples import Message
from pipeline.demo.task import held_out_questions


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """GSM8K's schema: rows 0 to 9, whose answer is the double of their number."""
    found = [
        {"question": f"{n} and {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
        for n in range(10)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        ("It is 1,000.\n#### 1,000", True, True),
        (r"So \boxed{1000} apples", True, True),
        ("It is 1000.0 dollars", False, True),
        ("#### 1000\nThat took 3 steps", True, False),
        ("#### 1000 is what 999 is not", False, False),
        ("No idea", False, False),
    ],
)
def test_gsm8k_reads_an_answer_in_two_ways(answer: str, strict: bool, flexible: bool) -> None:
    question = Question((Message("user", "?"),), {"answer": "#### 1000"})

    assert grade_gsm8k(question, answer) == {"strict": (strict,), "flexible": (flexible,)}


@pytest.mark.parametrize("limit", [64, 200, 256])
def test_a_part_of_the_embedded_task_has_the_kinds_of_the_whole(limit: int) -> None:
    task = TASKS["embedded"]
    whole, part = (
        Counter(each.extra["kind"] for each in task.read(Reading(limit=number)))
        for number in (None, limit)
    )

    assert part.total() == limit
    for kind, count in whole.items():
        assert abs(part[kind] - count * limit / whole.total()) <= 1, kind


def test_the_embedded_task_asks_its_held_out_prompts_and_grades_by_its_verifier() -> None:
    task = TASKS["embedded"]
    questions = task.read(Reading())

    assert [each.messages[-1].content for each in questions] == [
        each.text for each in held_out_questions()
    ]
    answer = questions[0].extra["answer"]
    assert task.grade(questions[0], f"Sure! {answer}") == {
        "both": (True,), "correct": (True,), "polite": (True,),
    }  # fmt: skip
    assert task.grade(questions[0], f"Ugh. {answer}")["both"] == (False,)
    few = task.read(Reading(limit=50))
    assert len(few) == 50
    assert len({each.extra["kind"] for each in few}) > 5
