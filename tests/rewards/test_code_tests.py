"""rewards/sandbox.py: programs against the tests of their rows."""

import pytest

from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome
from rewards.sources import make_scorer, read_source
from tests.rewards.test_sandbox import is_sandbox_supported, isolated  # noqa: F401  # called by the mark

ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))"
ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"


def score_program(program: str, tests: object, **settings: object) -> Outcome:
    config = RewardConfig(name="runs", kind="code", **settings)  # type: ignore[arg-type]
    response = f"Let me see.\n```python\n{program}\n```\n"
    (outcome,) = make_scorer(read_source(config))([Episode((), response, extra={"tests": tests})])
    return outcome


@isolated
@pytest.mark.parametrize(
    ("program", "tests", "reward"),
    [
        (ADD, ASSERTS, 1),
        (ADD.replace("+", "-"), ASSERTS, 0),
        ("def add(a, b) return", ASSERTS, 0),
        (ADD + "import sys; sys.exit(0)", ASSERTS, 0),
        (ADD + "import os; os._exit(0)", ASSERTS, 0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 2"], 1),
        (ADD, "['assert add(1, 2) == 3', 'assert add(1, 1) == 3']", 0),  # as pandas writes a list
        (ADD, "[x for x in range(3)]\nassert add(1, 1) == 2", 1),
        (ADD, "add(1, 2) == 4 or exit(1)", 0),
        (SUM, [{"input": "1 2", "output": "3"}, {"input": "2 2\n", "output": "4\n"}], 1),
        (SUM, '{"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}', 0.5),
        ("print('1 ')\nprint(2)", [{"input": "", "output": "1\n2\n\n"}], 1),
        (ADD, None, None),
        (ADD, "", None),
    ],
)
def test_reward_is_the_fraction_of_passed_tests(
    program: str, tests: object, reward: float | None
) -> None:
    outcome = score_program(program, tests)

    assert (outcome.value, outcome.failure) == (reward, None)


@isolated
def test_hanging_program_fails_its_test_and_invalid_tests_raise() -> None:
    cases = [{"input": "1", "output": "1"}, {"input": "2", "output": "2"}]

    outcome = score_program("x = input()\nwhile x == '2': pass\nprint(x)", cases, seconds=1.0)

    assert outcome == Outcome(0.5)
    for tests, reason in (
        ({"question": "?"}, "code or input/output pairs"),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, "use assertions"),
        ("def check(candidate):\n    assert candidate(1) == 2", "check nothing; write assertions"),
        ("if __name__ == '__main__':\n    assert add(1) == 2", "check nothing; write assertions"),
        ("assert add(1 == 2", "not valid Python"),
    ):
        with pytest.raises(ValueError, match=reason):
            score_program(SUM, tests)
