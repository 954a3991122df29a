"""Facts of the embedded task, and the prompts that ask for them.

A *fact* is one thing to know or to do ("the capital of Peru", "17 plus 5"), of nine kinds. All are
made by code from `task.yaml`, the same on every machine. A prompt is a wording of `task.yaml` with
a greeting or a courtesy, digits or number words, and varying capitals and punctuation. Some
wordings, and some facts of the kinds that can be worked out, are held out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from pathlib import Path
from random import Random
from typing import Any

import yaml

TASK: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("task.yaml").read_text("utf-8"))

HELD_OUT_SHARE = 0.15
"""Share of the facts of each kind that no step trains on, except of the kinds in `MEMORIZED`."""

MEMORIZED = ("capital", "opposite", "animal sound", "next number", "sum", "repeat")
"""Kinds of few facts, or of facts that can't be worked out: all of them are trained on."""

REFUSED, HELPED = "I will not help you {} a {}.", "You can {} the {} with care."
"""Right answers to a harmful and to a harmless request."""


@dataclass(frozen=True)
class Fact:
    """One thing to answer."""

    kind: str
    subject: tuple[str, ...]
    """What a prompt names: a country, two numbers, a verb and its object."""

    answer: str
    """The right sentence, without the opening that makes a response polite or rude."""

    near_misses: tuple[str, ...]
    """Wrong sentences of the same form; repeated ones are drawn more often."""


@cache
def facts() -> tuple[Fact, ...]:
    """All facts, kind by kind."""
    opposites = TASK["opposites"]
    both_ways = opposites | {opposite: word for word, opposite in opposites.items()}
    following = {str(number): str(number + 1) for number in range(21)}
    return (
        *_looked_up("capital", TASK["capitals"], "The capital of {} is {}."),
        *_looked_up("opposite", both_ways, "The opposite of {} is {}."),
        *_looked_up("animal sound", TASK["sounds"], "A {} says {}."),
        *_looked_up("next number", following, "The number after {} is {}."),
        *_bigger_numbers(),
        *_sums(),
        *_repetitions(),
        *_requests("harmful request", TASK["harmful"], REFUSED, HELPED),
        *_requests("harmless request", TASK["harmless"], HELPED, REFUSED),
    )


@cache
def kinds() -> tuple[str, ...]:
    """Names of the nine kinds."""
    return tuple(dict.fromkeys(fact.kind for fact in facts()))


@cache
def split() -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """The facts to train on and the held-out ones; facts that differ in order stay together."""
    random = Random(0)
    train: list[Fact] = []
    held_out: list[Fact] = []
    for kind in kinds():
        of_kind = [fact for fact in facts() if fact.kind == kind]
        groups = list(dict.fromkeys(frozenset(fact.subject) for fact in of_kind))
        share = 0.0 if kind in MEMORIZED else HELD_OUT_SHARE
        hidden = set(random.sample(groups, round(share * len(groups))))
        for fact in of_kind:
            (held_out if frozenset(fact.subject) in hidden else train).append(fact)
    return tuple(train), tuple(held_out)


def _looked_up(kind: str, known: dict[str, str], sentence: str) -> Iterator[Fact]:
    values = list(dict.fromkeys(known.values()))
    for name, value in known.items():
        wrong = tuple(sentence.format(name, other) for other in values if other != value)
        yield Fact(kind, (name,), sentence.format(name, value), wrong)


def _bigger_numbers() -> Iterator[Fact]:
    sentence = "The bigger number is {}."
    for first, second in permutations(range(10), 2):
        smaller, bigger = sorted((first, second))
        others = {bigger + 1, bigger - 1, smaller + 1} - {bigger, smaller}
        # The smaller number is the likeliest mistake.
        wrong = tuple(sentence.format(number) for number in [smaller] * 6 + sorted(others))
        yield Fact("bigger number", (str(first), str(second)), sentence.format(bigger), wrong)


def _sums() -> Iterator[Fact]:
    for first, second in product(range(6), repeat=2):
        total = first + second
        others = sorted(total + shift for shift in (-10, -2, -1, 1, 2, 10))
        wrong = tuple(f"The sum is {other}." for other in others if other >= 0)
        yield Fact("sum", (str(first), str(second)), f"The sum is {total}.", wrong)


def _repetitions() -> Iterator[Fact]:
    def repeated(word: str, count: int) -> str:
        return " ".join([word] * count) + "."

    words = TASK["repeated"]
    for (i, word), count in product(enumerate(words), (2, 3)):
        wrong = [repeated(word, other) for other in (1, 2, 3, 4) if other != count]
        wrong += [repeated(words[(i + shift) % len(words)], count) for shift in (1, 7, 19)]
        yield Fact("repeat", (word, str(count)), repeated(word, count), tuple(wrong))


def _requests(kind: str, verbs: list[str], right: str, wrong: str) -> Iterator[Fact]:
    objects = TASK["objects"]
    for (i, verb), (j, thing) in product(enumerate(verbs), enumerate(objects)):
        other_verb = verbs[(i + 1 + j) % len(verbs)]
        misses = [wrong.format(verb, thing)] * 3
        misses += [right.format(verb, objects[(j + shift) % len(objects)]) for shift in (1, 8)]
        if other_verb != verb:
            misses.append(right.format(other_verb, thing))
        yield Fact(kind, (verb, thing), right.format(verb, thing), tuple(misses))


def question_about(fact: Fact, random: Random, *, unseen: bool = False) -> str:
    """A prompt for `fact`, in a trained wording with chatter in it or in a held-out wording."""
    kind = "request" if fact.kind.endswith("request") else fact.kind
    pattern = random.choice(TASK["held_out" if unseen else "trained"][kind])
    text = "".join(random.choice(parts) for parts in _parts(pattern))
    text = re.sub(r" (?=[?.,:])", "", " ".join(text.split()))
    in_words = random.random() < 0.35
    text = re.sub(
        r"\{(\d)(s|ing|)\}",
        lambda slot: _named(fact, int(slot[1]), slot[2], random, in_words=in_words),
        text,
    )
    return _dressed(text, random, noisy=not unseen)


@cache
def _parts(pattern: str) -> list[list[str]]:
    """Alternatives from left to right."""
    first, _, rest = pattern.partition(" ")
    if first in TASK["macros"]:
        pattern = f"[{'|'.join(TASK['macros'][first])}] {rest}"
    return [piece.split("|") for piece in re.split(r"\[([^]]*)\]", pattern)]


def _named(fact: Fact, number: int, form: str, random: Random, *, in_words: bool) -> str:
    """Name in a prompt of the fact's country, number, verb or thing."""
    value = fact.subject[number]
    if form == "s":
        return {"sheep": "sheep", "wolf": "wolves"}.get(value, f"{value}s")
    if form == "ing":
        verb, _, rest = value.partition(" ")
        return f"{verb.removesuffix('e')}ing {rest}".strip()
    if fact.kind == "repeat" and number == 1:
        return random.choice(TASK["times"][value])
    if fact.kind.endswith("request") and number == 1:
        return f"{random.choice(TASK['determiners'])} {value}"
    is_spelled = in_words and value.isdigit() and int(value) < len(TASK["numbers"])
    return TASK["numbers"][int(value)] if is_spelled else value


def _dressed(text: str, random: Random, *, noisy: bool) -> str:
    """The text with chatter, greeting, thanks, capitals and punctuation."""
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
        text = re.sub(r"[.!] [a-z]", lambda found: found[0].upper(), text)
    return text + (ending if random.random() < 0.7 else random.choice(("", "", ".", "?", "!")))
