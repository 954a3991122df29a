"""Settings of `python -m rewards.select`, and the choice among the responses to a prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.data.examples import Message
from pipeline.errors import require
from rewards.config import RewardConfig, check_limits, read_spec


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """Which answers are sampled, what scores them and what is written."""

    path: str = ""
    """Model that answers: a directory, such as OUT/step1_sft, or Hub id."""

    prompts: str = ""
    """Rows with the prompts: a file, directory or Hub name, or `embedded`."""

    fields: dict[str, str] = field(default_factory=dict)
    """Column names where they differ from the usual: prompt=question."""

    reward: tuple[str, ...] = ()
    """Sources of rewards: file.py:function (--reward-function), a kind (math, verifier, ...), or
    all settings, '{kind: model, path: OUT/step2_reward}' for a reward model."""

    best_of: int = 16
    """Answers to each prompt."""

    write: Literal["demonstrations", "pairs"] = "demonstrations"
    """demonstrations: the best answer to each prompt, for step 1; pairs: the best and the worst,
    for step 2."""

    output: Path = Path("selected.jsonl")
    """File for the rows; replaced where it exists."""

    min_reward: float | None = None
    """Choose no answer of a lower reward; null takes the best, however bad it is."""

    limit: int | None = None
    """Prompts, from the first; null is all."""

    temperature: float = 1.0
    """Temperature of sampling, above 0."""

    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""

    max_new_tokens: int = 256
    """Longest answer, in tokens; one that is cut off there is never chosen."""

    batch_size: int = 32
    """Answers in a batch; changes none of them."""

    seed: int = 0
    """The same seed draws the same answers."""

    timeout_seconds: float = 10.0
    """Seconds that one call of a source may take; a longer one has failed."""

    workers: int = 2
    """Processes in which programs compute rewards."""

    max_failures: float = 0.1
    """Share of the answers on which a source may fail."""

    cache_dir: Path | None = None
    """Where answers of endpoints are kept, so that none is asked for twice."""

    def __post_init__(self) -> None:
        require(bool(self.path), "--path is missing: give the model that answers")
        require(bool(self.prompts), "--prompts is missing: give rows with prompts")
        require(bool(self.reward), "--reward is missing: give file.py:function, or a kind as math")
        require(self.best_of > 1, f"--best-of must be 2 or more, got {self.best_of}")
        require(
            self.temperature > 0,
            f"--temperature must be above 0, got {self.temperature}: without chance all"
            f" {self.best_of} answers are one",
        )
        for name in ("limit", "max_new_tokens", "batch_size"):
            value = getattr(self, name)
            option = name.replace("_", "-")
            require(value is None or value > 0, f"--{option} must be above 0, got {value}")
        check_limits(
            timeout_seconds=self.timeout_seconds,
            workers=self.workers,
            max_failures=self.max_failures,
        )

    @property
    def sources(self) -> list[RewardConfig]:
        """What scores the answers, in the order of the command line."""
        found: list[RewardConfig] = []
        for spec in self.reward:
            found.append(read_spec(spec, [each.name for each in found]))
        for source in found:
            require(
                source.kind != "model" or source.path is not None,
                "--reward model: say which one, as '{kind: model, path: OUT/step2_reward}'",
            )
            require(
                not source.members,
                f"--reward {source.name}: step 3 alone pools the members of a reward model; name"
                " each model as a source, whose scores are summed by weight",
            )
        return found


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
