r"""rewards/symbolic.py: answers that are not numbers, and hostile ones."""

import time
from pathlib import Path

import pytest

from rewards import symbolic
from rewards.config import RewardConfig
from rewards.contract import Episode
from rewards.math_answers import math_scorer

ROWS = (Path(__file__).parent / "math_answers.txt").read_text().splitlines()
"""The row's answer, a response's, and whether they are equal, labeled by hand."""


def reward(gold: object, response: str) -> float | None:
    (outcome,) = math_scorer(RewardConfig(name="right", kind="math"))(
        [Episode((), response, extra={"answer": gold})]
    )
    assert outcome.failure is None
    return outcome.value


def find_wrong(rows: list[str]) -> list[str]:
    """Return rows whose reward is not the label."""
    split = [row.rsplit(" | ", 2) for row in rows]
    return [
        row
        for row, (gold, answer, label) in zip(rows, split, strict=True)
        if reward(gold, f"So it is \\boxed{{{answer}}}.") != float(label)
    ]


@pytest.mark.parametrize("stride", [25, pytest.param(1, marks=pytest.mark.grid)])
def test_reward_of_each_answer_is_its_label(stride: int) -> None:
    assert len(ROWS) >= 200
    assert find_wrong(ROWS[::stride]) == []


@pytest.mark.parametrize(
    ("gold", "response", "expected"),
    [
        ("5 or 6", "6", 0.0),
        ("5 or 6", r"\boxed{6 \text{ or } 5}", 1.0),
        (r"2\sqrt{3}", "so it is $\\sqrt{12}$.", 1.0),
        ("(1,2)", "The interval is\n\\[ (1, 2) \\]", 1.0),
        ("Reasoning of a row.\n#### x+1", "the result is\n1 + x", 1.0),
        ("A", "The answer is\nA", 1.0),
        ("The answer is Paris", "Paris", None),
        ("", "Paris", None),
    ],
)
def test_formulas_are_found_in_rows_and_responses(
    gold: str, response: str, expected: float | None
) -> None:
    assert reward(gold, response) == expected


HOSTILE = [
    *(f"{base}^{{9^{{9^{{{top}}}}}}}" for base in (2, 3, 7, "x", "(1+x)") for top in (9, 99)),
    *("(" * n + "x" + ")" * n for n in (20, 200, 490)),
    *("\\frac{1}{" * n + "x" + "}" * n for n in (10, 50, 90)),
    *("\\sqrt{" * n + "x" + "}" * n for n in (10, 50, 120)),
    *("x^" * n + "2" for n in (10, 100, 400)),
    *("[" * n for n in (1, 100, 900)),
    *("\\" * n for n in (1, 2, 999)),
    *("{" * n + "}" * m for n, m in ((1, 0), (0, 1), (300, 299))),
    *(f"\\sum_{{i=1}}^{{10^{{{n}}}}} i^i" for n in (2, 9, 99)),
    *(f"\\int_0^{{{n}}} e^{{x^x}} dx" for n in (1, 10**9, "\\infty")),
    *(f"(x+y+z)^{{{n}}}" for n in (50, 500, 10**9)),
    *(f"{n}!" for n in (10**5, 10**7, "(10^{9})")),
    "+".join(f"x_{{{n}}}" for n in range(90)),
    "\\lim_{x\\to 0} \\sin(1/x)", "\\prod_{n=1}^{\\infty} n", "\\text{" * 99, "$" * 500, "\0x",
    "\ud800", "x" * 100_000, "__import__('os').system('true')", "=" * 300,
]  # fmt: skip


@pytest.mark.parametrize("stride", [10, pytest.param(1, marks=pytest.mark.grid)])
def test_hostile_answer_ends_at_its_deadline(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(HOSTILE) >= 50
    symbolic.are_equivalent("x", "y")  # imports math-verify
    monkeypatch.setattr(symbolic, "TIMEOUT_SECONDS", 0.5)
    for answer in HOSTILE[::stride]:
        start = time.monotonic()
        assert reward("x+17", f"\\boxed{{{answer}}}") == 0.0
        assert time.monotonic() - start < 3, answer
