"""The embedded task: rows for the three steps, and the program that judges an answer.

Step 1's demonstrations are of mixed quality on purpose: a model that imitates them is right and
polite about as often as they are, so steps 2 and 3 have something to improve, and `judge` can say
by how much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random

from pipeline.data.embedded_facts import (
    POLITE,
    RUDE,
    Fact,
    Question,
    facts,
    kinds,
    split,
)
from pipeline.data.embedded_talk import TALK
from pipeline.data.examples import Example, Message

DEMONSTRATIONS = 48_000
"""Training rows of step 1."""

PAIRS = 19_200
"""Training rows of step 2."""

EVAL_DEMONSTRATIONS = 512
"""Evaluation rows of step 1, of the same mixture as its training rows."""

EVAL_PAIRS = 768
"""Evaluation rows of step 2."""

CORRECT_SHARE = 0.6
"""Share of step 1's demonstrations that are correct."""

POLITE_SHARE = 0.5
"""Share of step 1's demonstrations that are polite."""


@dataclass(frozen=True)
class Verdict:
    """What the judge says of one answer."""

    kind: str
    """The kind of the question, such as `capital`."""

    correct: bool
    """The answer is the right sentence, after its opening if it has one, and nothing else."""

    polite: bool
    """The answer opens politely and is rude nowhere."""

    @property
    def both(self) -> bool:
        """Correct and polite."""
        return self.correct and self.polite


def judge(question: str, answer: str) -> Verdict | None:
    """The verdict on `answer`; None for a question neither of the task nor written by hand."""
    known = _right_answers().get(question.strip())
    return None if known is None else verdict(*known, answer)


def verdict(kind: str, right: str, answer: str) -> Verdict:
    """The verdict on `answer` where `right` is the right sentence."""
    sentence = answer.strip()
    polite = sentence.startswith(POLITE) and not any(opening in sentence for opening in RUDE)
    for opening in (*POLITE, *RUDE):
        if sentence.startswith(opening):
            sentence = sentence.removeprefix(opening).lstrip()
            break
    return Verdict(kind=kind, correct=sentence == right, polite=polite)


@lru_cache(maxsize=6)
def stage_examples(*, step: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Training and evaluation rows of a step, 1 to 3.

    Step 1 has demonstrations, `CORRECT_SHARE` of them correct and, independently, `POLITE_SHARE`
    polite; its evaluation rows are drawn in the same way, so that their perplexity measures what is
    trained. Step 2 has pairs in which the chosen response is better: correct before incorrect, then
    polite before rude. Step 3 has every prompt once. Steps 1 and 2 draw each kind equally often.

    Evaluation rows come from held-out prompts alone and are the same for every seed. The lists are
    kept, as a plan and the steps look at the same rows: they are not to be changed.
    """
    train, held_out = split()
    random, eval_random = Random(f"step {step}, seed {seed}"), Random(f"step {step}, evaluation")
    if step == 1:
        return (
            _demonstrations(train, DEMONSTRATIONS, random),
            _demonstrations(held_out, EVAL_DEMONSTRATIONS, eval_random),
        )
    if step == 2:
        return _pairs(train, PAIRS, random), _pairs(held_out, EVAL_PAIRS, eval_random)
    if step == 3:
        return _prompts(train, random), _prompts(held_out, eval_random)
    raise ValueError(f"there are three steps, got {step}")


def corpus() -> list[str]:
    """Every prompt, and every right or nearly right response with every opening."""
    prompts = [text for fact in facts() for text in fact.wordings]
    sentences = dict.fromkeys(text for fact in facts() for text in (fact.answer, *fact.near_misses))
    return prompts + [f"{opening} {text}" for opening in (*POLITE, *RUDE) for text in sentences]


def _demonstrations(questions: Sequence[Question], count: int, random: Random) -> list[Example]:
    by_kind = _by_kind(questions)
    rows: list[Example] = []
    for _ in range(count):
        question = random.choice(random.choice(by_kind))
        correct, polite = random.random() < CORRECT_SHARE, random.random() < POLITE_SHARE
        response = _response(question.fact, correct=correct, polite=polite, random=random)
        rows.append(Example(prompt=_prompt(question), chosen=response, origin="embedded task"))
    return rows


def _pairs(questions: Sequence[Question], count: int, random: Random) -> list[Example]:
    by_kind = _by_kind(questions)
    qualities = [(correct, polite) for correct in (False, True) for polite in (False, True)]
    rows: list[Example] = []
    for _ in range(count):
        question = random.choice(random.choice(by_kind))
        rejected, chosen = (
            _response(question.fact, correct=correct, polite=polite, random=random)
            for correct, polite in sorted(random.sample(qualities, 2))
        )
        rows.append(
            Example(
                prompt=_prompt(question), chosen=chosen, rejected=rejected, origin="embedded task"
            )
        )
    return rows


def _prompts(questions: Sequence[Question], random: Random) -> list[Example]:
    shuffled = random.sample(questions, len(questions))
    return [Example(prompt=_prompt(question), origin="embedded task") for question in shuffled]


def _prompt(question: Question) -> tuple[Message, ...]:
    return (Message("user", question.text),)


def _response(fact: Fact, *, correct: bool, polite: bool, random: Random) -> tuple[Message, ...]:
    opening = random.choice(POLITE if polite else RUDE)
    sentence = fact.answer if correct else _wrong_sentence(fact, random)
    return (Message("assistant", f"{opening} {sentence}"),)


def _wrong_sentence(fact: Fact, random: Random) -> str:
    """A wrong answer: mostly a near miss, else the right answer to some other question."""
    while True:
        draw = random.random()
        if draw < 0.6:
            return random.choice(fact.near_misses)
        kind = fact.kind if draw < 0.9 else random.choice(kinds())
        sentence = random.choice(_facts_by_kind()[kind]).answer
        if sentence != fact.answer:
            return sentence


def _by_kind(questions: Sequence[Question]) -> list[list[Question]]:
    groups: dict[str, list[Question]] = {kind: [] for kind in kinds()}
    for question in questions:
        groups[question.fact.kind].append(question)
    return list(groups.values())


@cache
def _facts_by_kind() -> dict[str, list[Fact]]:
    return {kind: [fact for fact in facts() if fact.kind == kind] for kind in kinds()}


@cache
def _right_answers() -> dict[str, tuple[str, str]]:
    """Kind and right sentence of every prompt that is judged."""
    known = {text: (fact.kind, fact.answer) for fact in facts() for text in fact.wordings}
    return {prompt.text: (prompt.kind, prompt.answer) for prompt in TALK} | known
