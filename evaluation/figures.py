"""Figures of a task: shares of right answers, pass@k, and how far they can be trusted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from evaluation.contract import Grades
from pipeline.report.intervals import Interval, share_interval


@dataclass(frozen=True)
class Figure:
    """One number of a task."""

    task: str

    metric: str

    k: int
    """Responses of which one must be right; 1 is the share of right answers."""

    value: float

    count: int
    """What was graded of each response, over all questions: instructions, else questions."""

    questions: int

    @property
    def name(self) -> str:
        """`gsm8k_strict`, or `gsm8k_strict_pass@4`."""
        return f"{self.task}_{self.metric}{'' if self.k == 1 else f'_pass@{self.k}'}"

    @property
    def interval(self) -> Interval:
        """95 % by Wilson (1927), with the questions as independent trials.

        Where several responses to each were drawn, their mean varies less than a trial does, and
        the interval is on the safe side.
        """
        return share_interval(self.value * self.questions, self.questions)


def pass_at_k(count: int, right: int, k: int) -> float:
    """Probability that one of k responses is right, of `count` of which `right` are.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1),
    computed exactly.

    Raises:
        ValueError: k is larger than the number of responses.
    """
    if not 0 < k <= count:
        raise ValueError(f"pass@{k} of {count} responses")
    return float(1 - Fraction(math.comb(count - right, k), math.comb(count, k)))


def figures_of(task: str, grades: Sequence[Sequence[Grades]], ks: Sequence[int]) -> list[Figure]:
    """The figure for each k, metric by metric.

    Args:
        task: its name.
        grades: by question, those of its responses.
        ks: none larger than the number of responses.
    """
    figures = []
    for metric in grades[0][0]:
        # By thing that is graded, and response: whether it is right.
        things = [thing for of_question in grades for thing in _by_thing(of_question, metric)]
        for k in ks:
            values = [pass_at_k(len(thing), sum(thing), k) for thing in things]
            value = math.fsum(values) / len(values)
            figures.append(Figure(task, metric, k, value, len(things), len(grades)))
    return figures


def _by_thing(of_question: Sequence[Grades], metric: str) -> list[tuple[bool, ...]]:
    return list(zip(*(grades[metric] for grades in of_question), strict=True))
