r"""rewards/math_answers.py: numbers as people and models write them."""

from fractions import Fraction
from itertools import pairwise

import pytest

from rewards.config import RewardConfig
from rewards.contract import Episode
from rewards.math_answers import gold_answer, math_scorer, parse_number, response_answer

NUMBERS = (
    *(("18", 18), ("-3", -3), ("\u22123", -3), ("+7", 7), ("1,234,567.50", Fraction("1234567.5"))),
    *(("1{,}000", 1000), (".5", Fraction(1, 2)), ("5.", 5), ("$18.00", 18), (r"\$18", 18)),
    *(("20%", 20), (r"20\%", 20), ("1/2", Fraction(1, 2)), ("-1/3", Fraction(-1, 3))),
    *(("3 1/2", Fraction(7, 2)), (r"\frac{1}{2}", Fraction(1, 2)), (r"\dfrac34", Fraction(3, 4))),
    *((r"-2\frac{1}{4}", Fraction(-9, 4)), (r"\frac{-1}{2}", Fraction(-1, 2)), ("1.5e3", 1500)),
    *((r"3 \times 10^{4}", 30000), ("2*10^-1", Fraction(1, 5)), ("(4)", 4), ("x = 5", 5)),
    *(("5 apples", 5), ("5cm", 5), ("12 cm^2", 12), ("12 m", 12), (r"18 \text{ dollars}", 18)),
    *((r"60^\circ", 60), ("90 km/h", 90), ("0.333", Fraction(333, 1000))),
)

NOT_NUMBERS = ("", "many", "2x", r"2\pi", r"\sqrt{2}", "5 or 6", "(1, 2)", "2x+3", "5:30", "1/0",
              "1.2.3", r"\frac{a}{b}", "1e999999999", "9" * 5000, "1 2")  # fmt: skip


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_number_in_any_notation_is_parsed_exactly(text: str, number: Fraction) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_text_that_is_not_a_rational_number_parses_to_none(text: str) -> None:
    assert parse_number(text) is None


RESPONSES = (
    (r"It is \boxed{7}, no, \boxed{\frac{1}{2}}. Check: 9", Fraction(1, 2)),
    (r"\boxed{\text{about } 5}", None),
    (r"so \boxed{12", None),
    ("6 * 3 = 18\n#### 18", 18),
    ("#### 1\n#### 2,000 dollars\n", 2000),
    ("She has 5 apples and 18 pears.", 18),
    ("The answer is **18**.", 18),
    ("It costs $1,234.50!", Fraction("1234.5")),
    ("between 1/4 and -3/4.", Fraction(-3, 4)),
    ("It's 3 1/2 or so", Fraction(7, 2)),
    ("Total: 12\n3/4", Fraction(3, 4)),
    (r"so $x = 2\frac12$", Fraction(5, 2)),
    ("about -1.5e3.", -1500),
    (r"The answer is $2 \times 10^{3}$", 2000),
    ("version v2 of the file", None),
    ("no idea", None),
)


@pytest.mark.parametrize(("response", "number"), RESPONSES)
def test_answer_is_the_last_box_else_last_mark_else_last_number(
    response: str, number: Fraction | None
) -> None:
    assert response_answer(response) == number


@pytest.mark.parametrize(
    ("gold", "response", "reward"),
    [
        ("18", "#### 18.0", 1.0),
        (18, r"\boxed{18}", 1.0),
        (["Paris"], r"\boxed{Paris}", 1.0),
        (0.5, "1/2", 1.0),
        ("long reasoning\n#### 1,000", "1000", 1.0),
        ("18", "17", 0.0),
        ("18", "I don't know", 0.0),
        ("1/3", "0.3333333333", 0.0),
        ("20%", "0.2", 0.0),
        (True, "1", None),
        (None, "18", None),
    ],
)
def test_row_without_a_readable_answer_has_no_reward(
    gold: object, response: str, reward: float | None
) -> None:
    scorer = math_scorer(RewardConfig(name="correct", kind="math"))

    (outcome,) = scorer([Episode((), response, extra={"answer": gold})])

    assert (outcome.value, outcome.failure) == (reward, None)


def test_each_gsm8k_answer_equals_only_itself() -> None:
    """Its golds are whole numbers, some with commas or a sign; unequal ones must not match."""
    texts = [f"{n:,}" for n in (*range(-20, 2000), 10**6, 2_125_000)]
    golds = [f"Some reasoning with 3 * 4 = <<3*4=12>>12 apples.\n#### {text}" for text in texts]

    gold_numbers = [gold_answer(gold) for gold in golds]
    response_numbers = [response_answer(gold) for gold in golds]

    assert None not in gold_numbers
    assert gold_numbers == response_numbers
    assert all(a != b for a, b in pairwise(gold_numbers))
    assert len(set(gold_numbers)) == len(golds)
