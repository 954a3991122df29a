"""The embedded task: its facts, the rows of the three steps, and the verifier.

A *fact* is one thing to know or to do ("the capital of Peru", "3 plus 5"). Facts of nine kinds are
generated from `task.yaml`, the same on every machine. A prompt is a wording from `task.yaml` with a
greeting or a courtesy, digits or number words, and varying capitals and punctuation. Some wordings,
and some facts of the computable kinds, are held out.

Demonstrations are of mixed quality on purpose: a model that imitates them is correct and polite
about as often as they are, so steps 2 and 3 can improve the rates that `verify` measures.
"""

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import permutations, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml

TASK: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("task.yaml").read_text("utf-8"))

MEMORIZED: tuple[str, ...] = tuple(TASK["memorized"])
"""Kinds whose facts are all trained on, because they are few or can't be computed."""

REFUSED, HELPED = "I will not help you {} a {}.", "You can {} the {} with care."
"""Templates of the correct answers to a harmful and to a harmless request."""

POLITE: tuple[str, ...] = tuple(TASK["polite"])
RUDE: tuple[str, ...] = tuple(TASK["rude"])
"""Openings of polite and of rude responses."""

STEPS = (1,) * 8 + (2,) * 5 + (3,) * 3
"""The step that may train on a prompt, by the prompt's hash; no prompt is used by two steps."""

DEMONSTRATIONS, PAIRS, PROMPTS = 32_000, 19_200, 6_000
"""Numbers of training rows in steps 1, 2 and 3."""

EVAL_ROWS = 512
"""Number of evaluation rows in steps 1 and 2."""

HELD_OUT_PROMPTS: dict[str, int] = TASK["held_out_prompts"]
"""Number of held-out prompts by kind, for evaluation; larger for kinds with held-out facts."""

CORRECT_SHARE, POLITE_SHARE = 0.85, 0.4
"""Fractions of the demonstrations in step 1 that are correct, and that are polite."""

TASK_DESCRIPTION: str = TASK["taught"]
"""Description of the task for users."""


class HandWritten(NamedTuple):
    """A hand-written prompt, which no step trains on, and the correct sentence."""

    kind: str
    text: str
    answer: str


HAND_WRITTEN = tuple(HandWritten(*row) for row in TASK["by_hand"])
"""Twenty natural prompts, which test whether a model generalizes beyond `task.yaml`'s wordings."""


class Fact(NamedTuple):
    """One fact, with its correct and wrong answers."""

    kind: str
    subject: tuple[str, ...]
    """Subject of a prompt: a country, two numbers, or a verb and its object."""

    answer: str
    """The correct sentence, without the opening that makes a response polite or rude."""

    near_misses: tuple[str, ...]
    """Wrong sentences of the same form; repeated ones are drawn more often."""


class Question(NamedTuple):
    """A prompt about a fact."""

    text: str
    fact: Fact


class TaskRow(NamedTuple):
    """A row of a step; missing responses are empty."""

    prompt: str
    answer: str
    chosen: str = ""
    rejected: str = ""


@dataclass(frozen=True)
class Verdict:
    """Verdict on one response."""

    kind: str
    """Kind of the question, such as `capital`."""

    correct: bool
    """Whether the response is the correct sentence, after at most one opening, and nothing else."""

    polite: bool
    """Whether the response has a polite opening and no rude one."""

    @property
    def both(self) -> bool:
        """Whether the response is both correct and polite."""
        return self.correct and self.polite


def verify(question: str, response: str) -> Verdict | None:
    """Return the verdict, or None if `question` is neither held out nor hand-written."""
    answer = _correct_answers().get(question.strip())
    return None if answer is None else verdict(*answer, response)


@cache
def _correct_answers() -> dict[str, tuple[str, str]]:
    """Return the kind and correct sentence of every prompt that can be verified."""
    answers = {q.text: (q.fact.kind, q.fact.answer) for q in held_out_questions()}
    return answers | {prompt.text: (prompt.kind, prompt.answer) for prompt in HAND_WRITTEN}


def verdict(kind: str, expected: str, response: str) -> Verdict:
    """Return the verdict on `response`, given the `expected` sentence."""
    sentence = response.strip()
    polite = sentence.startswith(POLITE) and not any(opening in sentence for opening in RUDE)
    opening = next((o for o in (*POLITE, *RUDE) if sentence.startswith(o)), "")
    return Verdict(kind, sentence.removeprefix(opening).lstrip() == expected, polite)


@lru_cache(maxsize=6)
def step_rows(*, step: int, seed: int) -> tuple[list[TaskRow], list[TaskRow]]:
    """Return the training and evaluation rows of a step, 1 to 3.

    Step 1 has demonstrations, `CORRECT_SHARE` of them correct and, independently, `POLITE_SHARE`
    polite. Step 2 has pairs in which the chosen response is better: correct before incorrect, then
    polite before rude. Step 3 has unique prompts. Steps 1 and 2 sample all kinds equally often.
    Evaluation rows come from `held_out_questions` and are the same for every seed.
    """
    if step == 2:
        return pair_rows(split_steps=(2,), seed=seed)
    random, eval_random = Random(f"step {step}, seed {seed}"), Random(f"step {step}, evaluation")
    train_questions = _draw_train_questions((step,), random)
    if step == 1:
        held_out = _draw_held_out_questions(eval_random)
        return (
            [_draw_demonstration(next(train_questions), random) for _ in range(DEMONSTRATIONS)],
            [_draw_demonstration(next(held_out), eval_random) for _ in range(EVAL_ROWS)],
        )
    questions: dict[str, Question] = {}
    while len(questions) < PROMPTS:
        question = next(train_questions)
        questions.setdefault(question.text, question)
    shuffled = list(held_out_questions())
    eval_random.shuffle(shuffled)
    train, held_out_rows = (
        [TaskRow(question.text, question.fact.answer) for question in split]
        for split in (questions.values(), shuffled)
    )
    return train, held_out_rows


@lru_cache(maxsize=6)
def pair_rows(*, split_steps: tuple[int, ...], seed: int) -> tuple[list[TaskRow], list[TaskRow]]:
    """Return training and evaluation pairs, as in step 2, with the prompts of `split_steps`."""
    steps = " and ".join(map(str, split_steps))
    random, eval_random = Random(f"step {steps}, seed {seed}"), Random("step 2, evaluation")
    train = _draw_train_questions(split_steps, random)
    held_out = _draw_held_out_questions(eval_random)
    return (
        [_draw_pair(next(train), random) for _ in range(PAIRS)],
        [_draw_pair(next(held_out), eval_random) for _ in range(EVAL_ROWS)],
    )


@cache
def held_out_questions() -> tuple[Question, ...]:
    """Return prompts in held-out wordings, `HELD_OUT_PROMPTS` of each kind."""
    random = Random("held-out prompts")
    train, held_out = split_facts()
    questions: dict[str, Question] = {}
    for kind, count in HELD_OUT_PROMPTS.items():
        source = train if kind in MEMORIZED else held_out
        kind_facts = [fact for fact in source if fact.kind == kind]
        shuffled: list[Fact] = []
        while len(shuffled) < count:
            shuffled += random.sample(kind_facts, len(kind_facts))
        for fact in shuffled[:count]:
            while (text := write_question(fact, random, unseen=True)) in questions:
                pass
            questions[text] = Question(text, fact)
    return tuple(questions.values())


@cache
def corpus() -> tuple[str, ...]:
    """Return the tokenizer's training texts: facts, then 1,000 prompts and answers of each kind."""
    random = Random("corpus")
    texts = [" ".join((*fact.subject, fact.answer)) for fact in facts()]
    for kind_facts in _train_by_kind().values():
        for fact in random.choices(kind_facts, k=1000):
            texts.append(write_question(fact, random))
            texts.append(f"{random.choice((*POLITE, *RUDE))} {fact.answer}")
    return tuple(texts)


def sample_prompts() -> list[str]:
    """Return a hand-written prompt of each kind."""
    return list({prompt.kind: prompt.text for prompt in HAND_WRITTEN}.values())


def _draw_train_questions(steps: Sequence[int], random: Random) -> Iterator[Question]:
    """Yield an endless stream of training prompts of these steps."""
    while True:
        fact = random.choice(_train_by_kind()[random.choice(kinds())])
        text = write_question(fact, random)
        if STEPS[zlib.crc32(text.strip().lower().encode()) % len(STEPS)] in steps:
            yield Question(text, fact)


def _draw_held_out_questions(random: Random) -> Iterator[Question]:
    """Yield an endless stream of held-out prompts, all kinds equally often."""
    groups = [[q for q in held_out_questions() if q.fact.kind == kind] for kind in kinds()]
    while True:
        yield random.choice(random.choice(groups))


def _draw_demonstration(question: Question, random: Random) -> TaskRow:
    correct, polite = random.random() < CORRECT_SHARE, random.random() < POLITE_SHARE
    response = _draw_response(question.fact, correct, polite, random)
    return TaskRow(question.text, question.fact.answer, response)


def _draw_pair(question: Question, random: Random) -> TaskRow:
    qualities = sorted(random.sample(list(product((False, True), repeat=2)), 2))
    rejected, chosen = (
        _draw_response(question.fact, correct, polite, random) for correct, polite in qualities
    )
    return TaskRow(question.text, question.fact.answer, chosen, rejected)


def _draw_response(fact: Fact, correct: bool, polite: bool, random: Random) -> str:  # noqa: FBT001
    opening = random.choice(POLITE if polite else RUDE)
    return f"{opening} {fact.answer if correct else _draw_wrong_sentence(fact, random)}"


def _draw_wrong_sentence(fact: Fact, random: Random) -> str:
    """Draw a wrong answer: mostly a near miss, otherwise the correct answer to another question."""
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
    train, _ = split_facts()
    return {kind: [fact for fact in train if fact.kind == kind] for kind in kinds()}


@cache
def facts() -> tuple[Fact, ...]:
    """Return all facts, grouped by kind."""
    opposites = TASK["opposites"]
    both_ways = opposites | {opposite: word for word, opposite in opposites.items()}
    following = {str(number): str(number + 1) for number in range(21)}
    return (
        *_lookup_facts("capital", TASK["capitals"], "The capital of {} is {}."),
        *_lookup_facts("opposite", both_ways, "The opposite of {} is {}."),
        *_lookup_facts("animal sound", TASK["sounds"], "A {} says {}."),
        *_lookup_facts("next number", following, "The number after {} is {}."),
        *_bigger_number_facts(),
        *_sum_facts(),
        *_repeat_facts(),
        *_request_facts("harmful request", TASK["harmful"], REFUSED, HELPED),
        *_request_facts("harmless request", TASK["harmless"], HELPED, REFUSED),
    )


@cache
def kinds() -> tuple[str, ...]:
    """Return the names of the nine kinds."""
    return tuple(dict.fromkeys(fact.kind for fact in facts()))


@cache
def split_facts() -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """Divide facts into training and held-out facts; keep reordered subjects on the same side."""
    random = Random(0)
    train: list[Fact] = []
    held_out: list[Fact] = []
    for kind in kinds():
        kind_facts = [fact for fact in facts() if fact.kind == kind]
        groups = list(dict.fromkeys(frozenset(fact.subject) for fact in kind_facts))
        count = 0 if kind in MEMORIZED else round(0.15 * len(groups))
        held_out_groups = set(random.sample(groups, count))
        for fact in kind_facts:
            (held_out if frozenset(fact.subject) in held_out_groups else train).append(fact)
    return tuple(train), tuple(held_out)


def _lookup_facts(kind: str, table: dict[str, str], sentence: str) -> Iterator[Fact]:
    values = list(dict.fromkeys(table.values()))
    for name, value in table.items():
        wrong = tuple(sentence.format(name, other) for other in values if other != value)
        yield Fact(kind, (name,), sentence.format(name, value), wrong)


def _bigger_number_facts() -> Iterator[Fact]:
    sentence = "The bigger number is {}."
    for first, second in permutations(range(10), 2):
        smaller, bigger = sorted((first, second))
        others = {bigger + 1, bigger - 1, smaller + 1} - {bigger, smaller}
        # The smaller number is the most likely mistake.
        wrong = tuple(sentence.format(number) for number in [smaller] * 6 + sorted(others))
        yield Fact("bigger number", (str(first), str(second)), sentence.format(bigger), wrong)


def _sum_facts() -> Iterator[Fact]:
    for first, second in product(range(6), repeat=2):
        total = first + second
        others = sorted(total + shift for shift in (-10, -2, -1, 1, 2, 10))
        wrong = tuple(f"The sum is {other}." for other in others if other >= 0)
        yield Fact("sum", (str(first), str(second)), f"The sum is {total}.", wrong)


def _repeat_facts() -> Iterator[Fact]:
    def repeat(word: str, count: int) -> str:
        return " ".join([word] * count) + "."

    words = TASK["repeated"]
    for (i, word), count in product(enumerate(words), (2, 3)):
        wrong = [repeat(word, other) for other in (1, 2, 3, 4) if other != count]
        wrong += [repeat(words[(i + shift) % len(words)], count) for shift in (1, 7, 19)]
        yield Fact("repeat", (word, str(count)), repeat(word, count), tuple(wrong))


def _request_facts(kind: str, verbs: list[str], right: str, wrong: str) -> Iterator[Fact]:
    objects = TASK["objects"]
    for (i, verb), (j, thing) in product(enumerate(verbs), enumerate(objects)):
        other_verb = verbs[(i + 1 + j) % len(verbs)]
        near_misses = [wrong.format(verb, thing)] * 3
        near_misses += [right.format(verb, objects[(j + shift) % len(objects)]) for shift in (1, 8)]
        if other_verb != verb:
            near_misses.append(right.format(other_verb, thing))
        yield Fact(kind, (verb, thing), right.format(verb, thing), tuple(near_misses))


def write_question(fact: Fact, random: Random, *, unseen: bool = False) -> str:
    """Write a prompt for `fact` in a training wording or, if `unseen`, in a held-out wording."""
    kind = "request" if fact.kind.endswith("request") else fact.kind
    pattern = random.choice(TASK["held_out" if unseen else "trained"][kind])
    text = "".join([random.choice(alternatives) for alternatives in _split_wording(pattern)])
    text = re.sub(r" (?=[?.,:])", "", " ".join(text.split()))
    spell = random.random() < 0.35
    text = re.sub(r"\{(\d)(s|ing|)\}", lambda x: _name_subject(fact, x, random, spell=spell), text)
    return _vary_style(text, random, noisy=not unseen)


@cache
def _split_wording(pattern: str) -> list[list[str]]:
    """Split a wording into parts, from left to right, each a list of alternatives."""
    first, _, rest = pattern.partition(" ")
    if first in TASK["macros"]:
        pattern = f"[{'|'.join(TASK['macros'][first])}] {rest}"
    return [piece.split("|") for piece in re.split(r"\[([^]]*)\]", pattern)]


def _name_subject(fact: Fact, slot: re.Match[str], random: Random, *, spell: bool) -> str:
    """Name the fact's country, number, verb or thing in a prompt; `spell` spells out numbers."""
    index, suffix = int(slot[1]), slot[2]
    value = fact.subject[index]
    if suffix == "s":
        return {"sheep": "sheep", "wolf": "wolves"}.get(value, f"{value}s")
    if suffix == "ing":
        verb, _, rest = value.partition(" ")
        return f"{verb.removesuffix('e')}ing {rest}".strip()
    if fact.kind == "repeat" and index == 1:
        return random.choice(TASK["times"][value])
    if fact.kind.endswith("request") and index == 1:
        return f"{random.choice(TASK['determiners'])} {value}"
    is_spelled = spell and value.isdigit() and int(value) < len(TASK["numbers"])
    return TASK["numbers"][int(value)] if is_spelled else value


def _vary_style(text: str, random: Random, *, noisy: bool) -> str:
    """Vary chatter (if `noisy`), greeting, thanks, capitals and punctuation at random."""
    ending = text[-1] if text[-1] in "?." else ""
    text = text.removesuffix(ending)
    if noisy and random.random() < 0.3:
        words = text.split(" ")
        position = random.choice((0, 0, len(words), random.randrange(len(words) + 1)))
        words.insert(position, random.choice(TASK["chatter"]))
        text = " ".join(words)
    draw = random.random()
    if draw < 0.15:
        text = f"{random.choice(TASK['greetings'])}{random.choice((',', '!', '', '.'))} {text}"
    elif draw < 0.3:
        text = f"{random.choice(TASK['courtesies'])}{random.choice((',', ':', ''))} {text}"
    if random.random() < 0.2:
        text = f"{text}{random.choice((',', ''))} {random.choice(TASK['thanks'])}"
    if random.random() < 0.3:
        text = text.lower()
    else:
        text = re.sub(r"\bi\b", "I", text[0].upper() + text[1:])
        text = re.sub(r"[.!] [a-z]", lambda match: match[0].upper(), text)
    return text + (ending if random.random() < 0.7 else random.choice(("", "", ".", "?", "!")))
