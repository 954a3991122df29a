"""rewards/sandbox.py: programs against the tests of their rows."""

import pytest

from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome
from rewards.sources import read_source, scorer_of
from tests.rewards.test_sandbox import is_possible, isolated  # noqa: F401  # the mark calls it

ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))"
ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"


def outcome(program: str, tests: object, **settings: object) -> Outcome:
    config = RewardConfig(name="runs", kind="code", **settings)  # type: ignore[arg-type]
    response = f"Let me see.\n```python\n{program}\n```\n"
    (scored,) = scorer_of(read_source(config))([Episode((), response, extra={"tests": tests})])
    return scored


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
def test_the_reward_is_the_share_of_tests_that_pass(
    program: str, tests: object, reward: float | None
) -> None:
    scored = outcome(program, tests)

    assert (scored.value, scored.failure) == (reward, None)


@isolated
def test_a_program_that_hangs_is_wrong_and_tests_that_can_not_be_read_are_a_failure() -> None:
    slow = [{"input": "1", "output": "1"}, {"input": "2", "output": "2"}]

    hangs = outcome("x = input()\nwhile x == '2': pass\nprint(x)", slow, seconds=1.0)

    assert hangs == Outcome(0.5)
    for tests, reason in (
        ({"question": "?"}, "neither code nor inputs and outputs"),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, "write assertions"),
        ("def check(candidate):\n    assert candidate(1) == 2", "only define functions; call"),
        ("if __name__ == '__main__':\n    assert add(1) == 2", "only define functions; call"),
        ("assert add(1 == 2", "not valid Python"),
    ):
        with pytest.raises(ValueError, match=reason):
            outcome(SUM, tests)
