r"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168).

Rows have the public schema: `question`, and `answer`, a solution that ends in `#### 18`. Two
readings of a response are graded side by side, because the choice moves the figure more than many a
training run does: `strict` takes the number that is marked as the answer, by #### or \boxed, and
`flexible` the last number of the text. Numbers are compared exactly, as fractions.
"""

from evaluation.contract import Grades, Question, Reading, Task, column, rows_of
from pipeline.data.examples import Message
from pipeline.data.rows.sources import Row
from pipeline.system.errors import DataError
from rewards.math_answers import gold_answer, last_number, marked_answer


def read(reading: Reading) -> list[Question]:
    """The problems of a data path, each behind the demonstrations that were asked for.

    Raises:
        DataError: a row lacks its question, or its answer has no number.
    """
    assert reading.path is not None
    queried, shown = rows_of(reading.path, reading.limit, shots=reading.shots)
    demonstrations = tuple(
        turn
        for row in shown
        for turn in (
            Message("user", _text(row, reading.instruction)),
            Message("assistant", str(column(row, "answer"))),
        )
    )
    return [_question(row, demonstrations, reading.instruction) for row in queried]


def grade(question: Question, response: str) -> Grades:
    """Whether the marked number, and the last number, of a response is the right one."""
    gold = gold_answer(question.extra["answer"])
    return {
        "strict": (marked_answer(response) == gold,),
        "flexible": (last_number(response) == gold,),
    }


def _question(row: Row, demonstrations: tuple[Message, ...], instruction: str) -> Question:
    answer = str(column(row, "answer"))
    if gold_answer(answer) is None:
        raise DataError(
            f"{row.origin}: its answer has no number behind ####; GSM8K's rows end in one"
        )
    turn = Message("user", _text(row, instruction))
    return Question((*demonstrations, turn), {"answer": answer})


def _text(row: Row, instruction: str) -> str:
    question = str(column(row, "question"))
    return f"{question}\n\n{instruction}" if instruction else question


GSM8K = Task("gsm8k", read, grade, max_new_tokens=512, needs_path=True, takes_shots=True)
