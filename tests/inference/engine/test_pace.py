"""How many tokens of prompts go with a step, by times that are given."""

from collections.abc import Iterator

from inference.engine.pace import FIRST, LEAST, Pace


def paced(*seconds: float, ratio: float | None = 3.0, most: int = 256) -> Pace:
    """A pace whose passes take so long."""

    def moments() -> Iterator[float]:
        now = 0.0
        for each in seconds:
            yield now
            now += each
            yield now

    times = moments()
    return Pace(ratio, most, clock=lambda: next(times))


def measure(pace: Pace, rows: int, tokens_read: int) -> None:
    pace.begin()
    pace.end(rows, tokens_read)


def test_a_step_has_room_for_what_its_budget_is_worth() -> None:
    pace = paced(10, 10, 30)
    measure(pace, 1, 0)
    measure(pace, 1, 0)
    assert pace.chunk(1, 1) == FIRST
    measure(pace, 1, 40)  # 40 tokens in 20 s besides the step: 0.5 s each

    # 2.7 times 10 s with one prompt are 17 s beside the step, twice as much with two.
    assert pace.chunk(1, 1) == 34
    assert pace.chunk(1, 2) == 68
    assert pace.chunk(1, 9) == 256


def test_steps_of_more_rows_have_budgets_of_their_own() -> None:
    pace = paced(10, 40, 20)
    measure(pace, 1, 0)
    measure(pace, 8, 0)
    measure(pace, 0, 20)  # a pass of prompts alone: 1 s each

    assert [pace.chunk(rows, 1) for rows in (1, 8, 15, 16)] == [17, 68, 68, 68]


def test_the_slower_ones_of_the_newest_passes_count_but_for_one() -> None:
    pace = paced(10, *[20] * 4, 30, 110)
    measure(pace, 1, 0)
    for number in range(1, 7):
        measure(pace, 1, 10 * number)

    assert pace.chunk(1, 1) == 8  # 17 s at 2 s, not at 10 s or 1 s


def test_prompts_are_read_at_least_a_little_and_at_most_as_wanted() -> None:
    slow = paced(10, 1000)
    measure(slow, 1, 0)
    measure(slow, 1, 10)
    free = paced(ratio=None, most=64)

    assert slow.chunk(1, 1) == LEAST
    assert free.chunk(1, 1) == 64


def test_passes_before_a_token_count_together_and_idle_ones_not() -> None:
    pace = paced(10)
    pace.begin()
    pace.forget()
    pace = paced(10, 30)
    measure(pace, 1, 0)
    pace.begin()
    pace.begin()  # a pass of prompts alone, then the step
    pace.end(1, 20)

    assert pace.chunk(1, 1) == 17
