"""How many tokens of prompts are read beside a decoding step, by how long both have taken.

As in Sarathi-Serve (Agrawal et al. 2024), a step has a budget that decoding and prompts share. Here
it is one of time: a step may take that many times as long as one that decodes alone, and what that
is worth in tokens of prompts is measured as they are read.
"""

from collections import deque
from collections.abc import Callable
from statistics import median
from time import perf_counter

LEAST = 4
"""Tokens that are read beside a step at least: prompts come to an end."""

STEPS, PASSES = 15, 5
"""Newest steps that decoded alone, whose median counts, and newest ones that read prompts."""

AIM = 0.9
"""What is planned of the time that a step may take: those of equal work scatter by a tenth."""

FIRST = 32
"""Tokens while it isn't known how long they take."""


class Pace:
    """Measures steps, and says how much of the prompts the next one has room for.

    Args:
        ratio: how many times as long as alone nearly all steps take at most beside one prompt;
            None is any.
        most: tokens of prompts beside a step at most.
        clock: in seconds.
    """

    def __init__(
        self, ratio: float | None, most: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._ratio = ratio
        self._most = most
        self._clock = clock
        self._steps: dict[int, deque[float]] = {}
        """Seconds of steps that decoded alone, by the bits of their number of rows."""
        self._tokens: deque[float] = deque(maxlen=PASSES)
        """Seconds of a token of prompts."""
        self._began: float | None = None
        self._read = 0

    def begin(self) -> None:
        """A pass begins: the first one since tokens were chosen, or one after it."""
        if self._began is None:
            self._began = self._clock()

    def forget(self) -> None:
        """The passes led to no token."""
        self._began = None

    def end(self, rows: int, tokens_read: int) -> None:
        """Tokens were chosen, of that many rows that were decoded.

        Args:
            rows: 0 where prompts alone were read.
            tokens_read: of prompts since the first of all passes.
        """
        if self._began is None:
            return
        seconds = self._clock() - self._began
        tokens, self._read = tokens_read - self._read, tokens_read
        self._began = None
        if not tokens:
            self._steps.setdefault(rows.bit_length(), deque(maxlen=STEPS)).append(seconds)
        elif (alone := self._alone(rows) if rows else 0.0) is not None:
            self._tokens.append(max(seconds - alone, seconds / 100) / tokens)

    def chunk(self, rows: int, prompts: int) -> int:
        """Tokens of that many prompts that may be read beside that many rows.

        Each prompt has a budget of its own: whoever waits for a first token counts as much as
        whoever waits for the next one.
        """
        alone = self._alone(rows)
        if self._ratio is None or alone is None:
            return self._most
        if not self._tokens:
            return min(FIRST, self._most)
        # Of the newest passes all but one were as fast, as the next one should be.
        seconds = sorted(self._tokens)[-2:][0]
        tokens = (AIM * self._ratio - 1) * alone * prompts / seconds
        return min(max(LEAST, int(tokens)), self._most)

    def _alone(self, rows: int) -> float | None:
        """Seconds of a step of that many rows; of the nearest number that is known."""
        if not self._steps:
            return None
        wanted = rows.bit_length()
        nearest = min(self._steps, key=lambda known: abs(known - wanted))
        return median(self._steps[nearest])
