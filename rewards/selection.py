"""Which of several answers to a prompt are worth to be learned from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.examples import Message


@dataclass(frozen=True)
class Candidate:
    """A sampled answer and what it is worth."""

    text: str

    reward: float | None
    """None where no source applies, or where one failed; never a 0."""

    stopped: bool = True
    """Whether it ended by itself. One that was cut off is never chosen: training would teach its
    end."""

    @property
    def may_be_chosen(self) -> bool:
        """Whether it is whole, has a text and a reward."""
        return self.reward is not None and self.stopped and bool(self.text.strip())


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The answer of the highest reward, the first of equal ones; None where none may be chosen."""
    chosen = [each for each in candidates if each.may_be_chosen]
    return max(chosen, key=_reward, default=None)


def best_and_worst(candidates: Sequence[Candidate]) -> tuple[Candidate, Candidate] | None:
    """The best answer and the one of the lowest reward, the first of equal ones.

    None where none may be chosen, or where the two are equal, in reward or in text.
    """
    better = best(candidates)
    known = [each for each in candidates if each.reward is not None and each.text.strip()]
    worse = min(known, key=_reward, default=None)
    if better is None or worse is None or _reward(better) <= _reward(worse):
        return None
    return None if better.text == worse.text else (better, worse)


def best_of_n_kl(n: int, kept: float = 1.0) -> float:
    """How far the best of n answers is from what they were drawn from, at most, in nats.

        log n - (n - 1) / n  -  log p - (n - 1) / n (1 - p) / p log(1 - p)

    where p is `kept`. The first part bounds KL(best of n || model), and is reached where no two
    answers are alike (Beirami et al. 2024, arXiv:2401.01879, theorem 1); it holds with ties too,
    which only merge answers. The second part is 0 at p = 1. It is for draws of which only some give
    a row, by whatever rule, with probability p: no rule can do more than keep the draws whose best
    answer has the highest rank, u^n > 1 - p, where the rank u of the best has density n u^(n-1).

    p times the bound is concave in p. So with prompts of different p their mean gives a bound of
    the mean KL over the rows.

    Args:
        n: answers to each prompt.
        kept: probability that a prompt gives a row, above 0.
    """
    of_all = math.log(n) - (n - 1) / n
    if kept >= 1:
        return of_all
    return of_all - math.log(kept) - (n - 1) / n * (1 - kept) / kept * math.log1p(-kept)


def demonstration(prompt: Sequence[Message], chosen: Candidate) -> dict[str, Any]:
    """A row that step 1 learns from."""
    return {"messages": [*map(_turn, prompt), _answer(chosen)], "reward": chosen.reward}


def pair(prompt: Sequence[Message], better: Candidate, worse: Candidate) -> dict[str, Any]:
    """A row that step 2 learns from; without a margin, which rewards have no unit for."""
    return {
        "prompt": [*map(_turn, prompt)],
        "chosen": [_answer(better)],
        "rejected": [_answer(worse)],
        "reward_chosen": better.reward,
        "reward_rejected": worse.reward,
    }


def _turn(message: Message) -> dict[str, Any]:
    turn = {"role": message.role, "content": message.content}
    return turn if message.trained else {**turn, "weight": 0}


def _answer(candidate: Candidate) -> dict[str, Any]:
    return {"role": "assistant", "content": candidate.text}


def _reward(candidate: Candidate) -> float:
    assert candidate.reward is not None
    return candidate.reward
