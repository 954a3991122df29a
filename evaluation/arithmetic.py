"""Sums of `python -m pipeline.demo.arithmetic`, whose answers are right or wrong."""

from evaluation.contract import Grades, Question, Reading, Task, column, rows_of
from pipeline.data.rows.shapes import read_row
from pipeline.data.rows.sources import Row
from pipeline.demo.arithmetic import ArithmeticConfig, sums
from pipeline.system.errors import DataError
from rewards.math_answers import gold_answer, response_answer


def read(reading: Reading) -> list[Question]:
    """The held-out sums of a directory of sums, else those that are written by default.

    Raises:
        DataError: a row has no prompt or no answer.
    """
    if reading.path is not None:
        rows, _ = rows_of(reading.path, reading.limit)
    else:
        config = ArithmeticConfig()
        held_out = sums(config)[: config.held_out][: reading.limit]
        rows = [Row(row, f"sum {number}") for number, row in enumerate(held_out, start=1)]
    return [_question(row) for row in rows]


def grade(question: Question, response: str) -> Grades:
    """Whether the response has the right sum."""
    return {"correct": (response_answer(response) == gold_answer(question.extra["answer"]),)}


def _question(row: Row) -> Question:
    example = read_row(row, {})
    answer = column(row, "answer", (str, int, float))
    if example is None or not example.prompt or gold_answer(answer) is None:
        raise DataError(f"{row.origin} must have a prompt and an answer that is a number")
    return Question(example.prompt, {"answer": answer})


ARITHMETIC = Task("arithmetic", read, grade, max_new_tokens=32)
