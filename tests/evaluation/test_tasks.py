"""What the tasks ask, and how they grade."""

import json
from collections import Counter
from pathlib import Path

import pytest

from evaluation import gsm8k
from evaluation.contract import Question, Reading
from evaluation.tasks import TASKS, paths_in, tasks_named
from pipeline.data.examples import Message
from pipeline.demo.task import held_out_questions
from pipeline.errors import ConfigError, DataError


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

    assert gsm8k.grade(question, answer) == {"strict": (strict,), "flexible": (flexible,)}


def test_demonstrations_are_turns_and_are_not_asked(rows: Path) -> None:
    questions = gsm8k.read(Reading(path=str(rows), shots=2, instruction="Think.", limit=3))

    assert len(questions) == 3
    assert questions[0].messages == (
        Message("user", "0 and 0?\n\nThink."),
        Message("assistant", "0 + 0 = 0\n#### 0"),
        Message("user", "1 and 1?\n\nThink."),
        Message("assistant", "1 + 1 = 2\n#### 2"),
        Message("user", "2 and 2?\n\nThink."),
    )
    assert len(gsm8k.read(Reading(path=str(rows), shots=2))) == 8


def test_of_a_set_with_a_test_split_that_is_asked(rows: Path) -> None:
    rows.rename(rows.with_name("train.jsonl"))
    row = {"question": "Of the test?", "answer": "#### 1"}
    rows.with_name("test.jsonl").write_text(json.dumps(row))

    (question,) = gsm8k.read(Reading(path=str(rows.parent), shots=1))

    assert [turn.content for turn in question.messages] == [
        "0 and 0?", "0 + 0 = 0\n#### 0", "Of the test?",
    ]  # fmt: skip


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


def test_sums_without_a_path_are_those_that_are_held_out_by_default() -> None:
    task = TASKS["arithmetic"]
    questions = task.read(Reading())

    assert len(questions) == 512
    first, second = questions[0].messages[0].content.rstrip("=").split("+")
    right = int(first) + int(second)
    assert task.grade(questions[0], f" {right}") == {"correct": (True,)}
    assert task.grade(questions[0], f"{right + 1}") == {"correct": (False,)}


def test_wrong_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1?", "answer": "one or two"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl line 1: its answer has no number behind"):
        gsm8k.read(Reading(path=str(path)))
    path.write_text('{"prompt": "1?", "answer": "#### 1"}\n')
    with pytest.raises(DataError, match=r"line 1 lacks the column question; it has answer, prompt"):
        gsm8k.read(Reading(path=str(path)))
    with pytest.raises(DataError, match="1 rows are too few for 8 demonstrations"):
        gsm8k.read(Reading(path=str(path), shots=8))


def test_wrong_names_are_refused() -> None:
    for names, paths, sentence in (
        (["gsm"], {}, "no task gsm; did you mean gsm8k"),
        (["gsm8k"], {}, "give a file or Hub name as --data gsm8k=PATH"),
        (["embedded"], {"gsm8k": "x"}, "gsm8k is not among the tasks"),
        (["embedded", "embedded"], {}, "named twice"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            tasks_named(names, paths, setting="--data")
    with pytest.raises(ConfigError, match=r"as gsm8k=rows\.jsonl"):
        paths_in(["rows.jsonl"], setting="--data")
