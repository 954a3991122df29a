"""The embedded task: rows for the three steps, and the program that judges an answer.

Step 1's demonstrations are of mixed quality on purpose: a model that imitates them is right and
polite about as often as they are, so steps 2 and 3 have something to improve, and `verify` can say
by how much.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random

from pipeline.data.embedded_facts import MEMORIZED, Fact, facts, kinds, split
from pipeline.data.embedded_talk import TALK
from pipeline.data.embedded_wordings import question_about
from pipeline.data.examples import Example, Message

POLITE = ("Sure!", "Of course!", "Happy to help!", "Good question!")
"""How a polite response begins."""

RUDE = ("Ugh.", "So boring.", "Whatever.", "Go away.")
"""How a rude response begins."""

SHARES = {1: 8, 2: 5, 3: 3}
"""Of 16 prompts, how many each step may use; no two steps share one, whatever their seeds."""

DEMONSTRATIONS = 32_000
"""Training rows of step 1."""

PAIRS = 19_200
"""Training rows of step 2."""

PROMPTS = 6_000
"""Training rows of step 3."""

EVAL_DEMONSTRATIONS = 512
"""Evaluation rows of step 1, of the same mixture as its training rows."""

EVAL_PAIRS = 512
"""Evaluation rows of step 2."""

HELD_OUT_PROMPTS = {
    "capital": 14,
    "opposite": 14,
    "animal sound": 14,
    "next number": 14,
    "sum": 14,
    "repeat": 14,
    "bigger number": 56,
    "harmful request": 80,
    "harmless request": 80,
}
"""Held-out prompts of each kind, more of kinds that have held-out facts to ask for."""

COLUMNS = ("answer",)
"""Columns of step 3's rows: the right sentence."""

CORRECT_SHARE = 0.85
"""Share of step 1's demonstrations that are correct."""

POLITE_SHARE = 0.4
"""Share of step 1's demonstrations that are polite."""


@dataclass(frozen=True)
class Question:
    """One prompt."""

    text: str
    fact: Fact


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


def verify(question: str, answer: str) -> Verdict | None:
    """The verdict on `answer`; None for a question that is neither held out nor written by hand."""
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
    polite before rude. Step 3 has prompts alone, each once. All draw each kind equally often, and
    no two steps share a training prompt.

    Evaluation rows come from `held_out_questions` alone and are the same for every seed. The lists
    are kept, as a plan and the steps look at the same rows: they are not to be changed.
    """
    random, eval_random = Random(f"step {step}, seed {seed}"), Random(f"step {step}, evaluation")
    if step == 1:
        train, held_out = _endless((step,), random), _rotating(eval_random)
        return (
            [_demonstration(next(train), random) for _ in range(DEMONSTRATIONS)],
            [_demonstration(next(held_out), eval_random) for _ in range(EVAL_DEMONSTRATIONS)],
        )
    if step == 2:
        return pair_examples(of_steps=(2,), seed=seed)
    if step == 3:
        questions = training_questions(step=step, seed=seed, count=PROMPTS)
        held_out_rows = list(held_out_questions())
        eval_random.shuffle(held_out_rows)
        return [_prompt_row(q) for q in questions], [_prompt_row(q) for q in held_out_rows]
    raise ValueError(f"there are three steps, got {step}")


@lru_cache(maxsize=6)
def pair_examples(*, of_steps: tuple[int, ...], seed: int) -> tuple[list[Example], list[Example]]:
    """Training and evaluation pairs, as step 2 has them, about the prompts of these steps."""
    parts = " and ".join(map(str, of_steps))
    random, eval_random = Random(f"step {parts}, seed {seed}"), Random("step 2, evaluation")
    train, held_out = _endless(of_steps, random), _rotating(eval_random)
    return (
        [_pair(next(train), random) for _ in range(PAIRS)],
        [_pair(next(held_out), eval_random) for _ in range(EVAL_PAIRS)],
    )


def training_questions(*, step: int, seed: int, count: int) -> list[Question]:
    """`count` different training prompts of a step."""
    random = Random(f"step {step}, seed {seed}")
    source = _endless((step,), random)
    found: dict[str, Question] = {}
    while len(found) < count:
        question = next(source)
        found.setdefault(question.text, question)
    return list(found.values())


@cache
def held_out_questions() -> tuple[Question, ...]:
    """Prompts in wordings that no step trains on, `HELD_OUT_PROMPTS` of each kind.

    What they ask for is not trained on either, but for kinds whose facts have to be learned.
    """
    random = Random("held-out prompts")
    train, held_out = split()
    found: dict[str, Question] = {}
    for kind, count in HELD_OUT_PROMPTS.items():
        of_kind = [fact for fact in (train if kind in MEMORIZED else held_out) if fact.kind == kind]
        for fact in _spread(of_kind, count, random):
            while (text := question_about(fact, random, unseen=True)) in found:
                pass
            found[text] = Question(text, fact)
    return tuple(found.values())


def _spread(of_kind: Sequence[Fact], count: int, random: Random) -> list[Fact]:
    """`count` of the facts, each as often as the others or once more."""
    rounds = -(-count // len(of_kind))
    shuffled = [fact for _ in range(rounds) for fact in random.sample(of_kind, len(of_kind))]
    return shuffled[:count]


def corpus() -> list[str]:
    """What the tokenizer is trained on: each kind as often, and all that facts name and answer."""
    random = Random("corpus")
    texts = [" ".join((*fact.subject, fact.answer)) for fact in facts()]
    for kind in kinds():
        for fact in random.choices(_train_by_kind()[kind], k=1000):
            texts += [
                question_about(fact, random),
                f"{random.choice((*POLITE, *RUDE))} {fact.answer}",
            ]
    return texts


def _endless(steps: Sequence[int], random: Random) -> Iterator[Question]:
    """Training prompts of these steps."""
    by_kind = _train_by_kind()
    while True:
        fact = random.choice(by_kind[random.choice(kinds())])
        text = question_about(fact, random)
        if _step_of(text) in steps:
            yield Question(text, fact)


def _step_of(text: str) -> int:
    """The one step that may train on a prompt."""
    place = zlib.crc32(text.strip().lower().encode()) % sum(SHARES.values())
    for step, share in SHARES.items():
        if place < share:
            return step
        place -= share
    raise AssertionError("the shares cover all places")


def _rotating(random: Random) -> Iterator[Question]:
    """Held-out prompts, a kind at a time."""
    groups = [[q for q in held_out_questions() if q.fact.kind == kind] for kind in kinds()]
    while True:
        yield random.choice(random.choice(groups))


def _demonstration(question: Question, random: Random) -> Example:
    correct, polite = random.random() < CORRECT_SHARE, random.random() < POLITE_SHARE
    response = draw_response(question.fact, correct=correct, polite=polite, random=random)
    return Example(prompt=_prompt(question), chosen=response, origin="embedded task")


def _pair(question: Question, random: Random) -> Example:
    qualities = [(correct, polite) for correct in (False, True) for polite in (False, True)]
    rejected, chosen = (
        draw_response(question.fact, correct=correct, polite=polite, random=random)
        for correct, polite in sorted(random.sample(qualities, 2))
    )
    return Example(
        prompt=_prompt(question), chosen=chosen, rejected=rejected, origin="embedded task"
    )


def _prompt_row(question: Question) -> Example:
    return Example(
        prompt=_prompt(question), origin="embedded task", extra={"answer": question.fact.answer}
    )


def _prompt(question: Question) -> tuple[Message, ...]:
    return (Message("user", question.text),)


def draw_response(
    fact: Fact, *, correct: bool, polite: bool, random: Random
) -> tuple[Message, ...]:
    """A response about a fact, right or wrong, polite or rude."""
    opening = random.choice(POLITE if polite else RUDE)
    sentence = fact.answer if correct else _wrong_sentence(fact, random)
    return (Message("assistant", f"{opening} {sentence}"),)


def _wrong_sentence(fact: Fact, random: Random) -> str:
    """A wrong answer: mostly a near miss, else the right answer to some other question."""
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
    """Kind and right sentence of every prompt that is judged."""
    known = {q.text: (q.fact.kind, q.fact.answer) for q in held_out_questions()}
    return known | {prompt.text: (prompt.kind, prompt.answer) for prompt in TALK}
