"""Rows of the embedded task for the three steps, and the verifier of its answers.

Demonstrations are of mixed quality on purpose: a model that imitates them is right and polite about
as often as they are, so that steps 2 and 3 have something to improve, and `verify` measures it.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random
from typing import NamedTuple

from pipeline.demo.facts import MEMORIZED, TASK, Fact, facts, kinds, question_about, split

POLITE = ("Sure!", "Of course!", "Happy to help!", "Good question!")
RUDE = ("Ugh.", "So boring.", "Whatever.", "Go away.")
"""Openings of polite and of rude responses."""

SHARES = {1: 8, 2: 5, 3: 3}
"""Of 16 prompts, those that each step may use; no two steps share one, whatever their seeds."""

DEMONSTRATIONS, PAIRS, PROMPTS = 32_000, 19_200, 6_000
"""Training rows of steps 1, 2 and 3."""

EVAL_ROWS = 512
"""Evaluation rows of steps 1 and 2."""

HELD_OUT_PROMPTS = dict.fromkeys(MEMORIZED, 14) | {
    "bigger number": 56,
    "harmful request": 80,
    "harmless request": 80,
}
"""Held-out prompts, which are the evaluation rows of step 3; more of kinds with held-out facts."""

CORRECT_SHARE, POLITE_SHARE = 0.85, 0.4
"""Shares of step 1's demonstrations."""

TAUGHT = (
    "It was taught nine things: capitals, opposites, animal sounds, the number after one up to 20,"
    " the bigger of two up to 9, sums up to 5 plus 5, to repeat a word two or three times, and to"
    " help with harmless requests but not with harmful ones."
)
"""Description of the task for users."""


class HandWritten(NamedTuple):
    """A prompt written by hand, which no step trains on, and the right sentence."""

    kind: str
    text: str
    answer: str


TALK = tuple(HandWritten(*row) for row in TASK["by_hand"])
"""Twenty prompts as people write them; they show whether a model generalizes beyond wordings."""


class Question(NamedTuple):
    """One prompt."""

    text: str
    fact: Fact


class TaskRow(NamedTuple):
    """A row of a step; responses that it does not have are empty."""

    prompt: str
    answer: str
    chosen: str = ""
    rejected: str = ""


Rows = tuple[list[TaskRow], list[TaskRow]]
"""Training rows and evaluation rows."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on one answer."""

    kind: str
    """Kind of the question, such as `capital`."""

    correct: bool
    """The answer is the right sentence, after at most one opening, and nothing else."""

    polite: bool
    """The answer has a polite opening and no rude one."""

    @property
    def both(self) -> bool:
        """Correct and polite."""
        return self.correct and self.polite


def verify(question: str, answer: str) -> Verdict | None:
    """Return the verdict on `answer`; None if `question` is neither held out nor hand-written."""
    known = _right_answers().get(question.strip())
    return None if known is None else verdict(*known, answer)


def verdict(kind: str, right: str, answer: str) -> Verdict:
    """Return the verdict on `answer` where `right` is the right sentence."""
    sentence = answer.strip()
    polite = sentence.startswith(POLITE) and not any(opening in sentence for opening in RUDE)
    opening = next((each for each in (*POLITE, *RUDE) if sentence.startswith(each)), "")
    return Verdict(kind, sentence.removeprefix(opening).lstrip() == right, polite)


@lru_cache(maxsize=6)
def stage_rows(*, step: int, seed: int) -> Rows:
    """Training and evaluation rows of a step, 1 to 3.

    Step 1 has demonstrations, `CORRECT_SHARE` of them correct and, independently, `POLITE_SHARE`
    polite. Step 2 has pairs in which the chosen response is better: correct before incorrect, then
    polite before rude. Step 3 has prompts, each once. Steps 1 and 2 draw each kind equally often.
    Evaluation rows come from `held_out_questions` and are the same for every seed.
    """
    if step == 2:
        return pair_rows(of_steps=(2,), seed=seed)
    random, eval_random = Random(f"step {step}, seed {seed}"), Random(f"step {step}, evaluation")
    if step == 1:
        train, held_out = _endless((step,), random), _rotating(eval_random)
        return (
            [_demonstration(next(train), random) for _ in range(DEMONSTRATIONS)],
            [_demonstration(next(held_out), eval_random) for _ in range(EVAL_ROWS)],
        )
    questions = {}
    source = _endless((step,), random)
    while len(questions) < PROMPTS:
        question = next(source)
        questions.setdefault(question.text, question)
    held_out_rows = list(held_out_questions())
    eval_random.shuffle(held_out_rows)
    return _prompts(questions.values()), _prompts(held_out_rows)


@lru_cache(maxsize=6)
def pair_rows(*, of_steps: tuple[int, ...], seed: int) -> Rows:
    """Training and evaluation pairs, as step 2 has them, with the prompts of these steps."""
    parts = " and ".join(map(str, of_steps))
    random, eval_random = Random(f"step {parts}, seed {seed}"), Random("step 2, evaluation")
    train, held_out = _endless(of_steps, random), _rotating(eval_random)
    return (
        [_pair(next(train), random) for _ in range(PAIRS)],
        [_pair(next(held_out), eval_random) for _ in range(EVAL_ROWS)],
    )


@cache
def held_out_questions() -> tuple[Question, ...]:
    """Prompts in held-out wordings, `HELD_OUT_PROMPTS` of each kind."""
    random = Random("held-out prompts")
    train, held_out = split()
    found: dict[str, Question] = {}
    for kind, count in HELD_OUT_PROMPTS.items():
        of_kind = [fact for fact in (train if kind in MEMORIZED else held_out) if fact.kind == kind]
        rounds = -(-count // len(of_kind))
        shuffled = [fact for _ in range(rounds) for fact in random.sample(of_kind, len(of_kind))]
        for fact in shuffled[:count]:
            while (text := question_about(fact, random, unseen=True)) in found:
                pass
            found[text] = Question(text, fact)
    return tuple(found.values())


def corpus() -> list[str]:
    """Texts that the tokenizer is trained on, equally many of each kind."""
    random = Random("corpus")
    texts = [" ".join((*fact.subject, fact.answer)) for fact in facts()]
    for kind in kinds():
        for fact in random.choices(_train_by_kind()[kind], k=1000):
            texts.append(question_about(fact, random))
            texts.append(f"{random.choice((*POLITE, *RUDE))} {fact.answer}")
    return texts


def to_try() -> list[str]:
    """A hand-written prompt of each kind."""
    return list({prompt.kind: prompt.text for prompt in TALK}.values())


def draw_response(fact: Fact, *, correct: bool, polite: bool, random: Random) -> str:
    """Draw a response about a fact, right or wrong, polite or rude."""
    opening = random.choice(POLITE if polite else RUDE)
    return f"{opening} {fact.answer if correct else _wrong_sentence(fact, random)}"


def _endless(steps: Sequence[int], random: Random) -> Iterator[Question]:
    """Training prompts of these steps."""
    while True:
        fact = random.choice(_train_by_kind()[random.choice(kinds())])
        text = question_about(fact, random)
        if _step_of(text) in steps:
            yield Question(text, fact)


def _step_of(text: str) -> int:
    """The one step that may train on a prompt."""
    position = zlib.crc32(text.strip().lower().encode()) % sum(SHARES.values())
    return next(step for step in SHARES if position < sum(SHARES[n] for n in range(1, step + 1)))


def _rotating(random: Random) -> Iterator[Question]:
    """Held-out prompts, of each kind equally often."""
    groups = [[q for q in held_out_questions() if q.fact.kind == kind] for kind in kinds()]
    while True:
        yield random.choice(random.choice(groups))


def _demonstration(question: Question, random: Random) -> TaskRow:
    correct, polite = random.random() < CORRECT_SHARE, random.random() < POLITE_SHARE
    response = draw_response(question.fact, correct=correct, polite=polite, random=random)
    return TaskRow(question.text, question.fact.answer, response)


def _pair(question: Question, random: Random) -> TaskRow:
    qualities = [(correct, polite) for correct in (False, True) for polite in (False, True)]
    rejected, chosen = (
        draw_response(question.fact, correct=correct, polite=polite, random=random)
        for correct, polite in sorted(random.sample(qualities, 2))
    )
    return TaskRow(question.text, question.fact.answer, chosen, rejected)


def _prompts(questions: Iterable[Question]) -> list[TaskRow]:
    return [TaskRow(question.text, question.fact.answer) for question in questions]


def _wrong_sentence(fact: Fact, random: Random) -> str:
    """A wrong answer: mostly a near miss, otherwise the right answer to another question."""
    while True:
        draw = random.random()
        if draw < 0.7:
            return random.choice(fact.near_misses)
        kind = fact.kind if draw < 0.9 else random.choice(kinds())
        sentence = random.choice(_train_by_kind()[kind]).answer
        if sentence != fact.answer:
            return sentence


@cache
def _train_by_kind() -> dict[str, list[Fact]]:
    train, _ = split()
    return {kind: [fact for fact in train if fact.kind == kind] for kind in kinds()}


@cache
def _right_answers() -> dict[str, tuple[str, str]]:
    """Kind and right sentence of every prompt that is verified."""
    known = {q.text: (q.fact.kind, q.fact.answer) for q in held_out_questions()}
    return known | {prompt.text: (prompt.kind, prompt.answer) for prompt in TALK}
