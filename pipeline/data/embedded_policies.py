"""What one can score on the embedded task without understanding a prompt.

Policies that know the training prompts with their right answers, and copy: their rates on the
held-out prompts are what a model's rate has to be read beside.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from random import Random

import numpy as np

from pipeline.data.embedded import (
    DEMONSTRATIONS,
    POLITE,
    Question,
    held_out_questions,
    training_questions,
    verify,
)
from pipeline.data.embedded_facts import facts
from pipeline.data.embedded_wordings import NUMBERS

Words = Callable[[str], Counter[str]]
"""The words of a prompt that a policy looks at, and how often each stands in it."""


def trivial_rates() -> dict[str, float]:
    """The judge's rate of each policy on the held-out prompts, every answer polite.

    The policies know as many training prompts of step 1 as that has rows, no two of them alike.
    """
    known = training_questions(step=1, seed=0, count=DEMONSTRATIONS)
    prompts = [question.text for question in held_out_questions()]
    answers = Counter(question.fact.answer for question in known)
    constants = {
        *(question.fact.answer for question in held_out_questions()),
        *_most_frequent_of_each_kind(known),
    }
    random = Random("trivial policies")
    everything = list(answers.elements())
    frequent = answers.most_common(1)[0][0]
    return {
        "best constant answer": max(_rate(prompts, [one] * len(prompts)) for one in constants),
        "most frequent answer": _rate(prompts, [frequent] * len(prompts)),
        "random training answer": _rate(prompts, random.choices(everything, k=len(prompts))),
        "nearest prompt, by all words": _rate(prompts, nearest_answers(known, prompts, all_words)),
        "nearest prompt, by what is named": _rate(
            prompts, nearest_answers(known, prompts, named_words)
        ),
    }


def nearest_answers(known: Sequence[Question], prompts: Iterable[str], words: Words) -> list[str]:
    """For each prompt the answer to the known one that shares most of both prompts' words.

    Nearness is the bags' intersection divided by their union; the first of the nearest counts.
    """
    postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
    sizes = np.empty(len(known))
    for row, question in enumerate(known):
        bag = words(question.text)
        sizes[row] = bag.total()
        for word, times in bag.items():
            postings[word].append((row, times))
    rows_and_times = {word: np.array(found).T for word, found in postings.items()}
    answers: list[str] = []
    for text in prompts:
        bag = words(text)
        shared = np.zeros(len(known))
        for word in bag.keys() & rows_and_times.keys():
            rows, times = rows_and_times[word]
            shared[rows] += np.minimum(times, bag[word])
        union = np.maximum(sizes + bag.total() - shared, 1)
        answers.append(known[int(np.argmax(shared / union))].fact.answer)
    return answers


def all_words(text: str) -> Counter[str]:
    """Every word and number of a prompt."""
    return Counter(re.findall(r"[a-z]+|\d+", text.lower()))


def named_words(text: str) -> Counter[str]:
    """Only what facts name: countries, numbers, animals, verbs and things."""
    return Counter(word for word in all_words(text).elements() if word in _named())


def _rate(prompts: Sequence[str], answers: Sequence[str]) -> float:
    """The share of polite answers that the judge finds right."""
    verdicts = [
        verify(text, f"{POLITE[0]} {answer}") for text, answer in zip(prompts, answers, strict=True)
    ]
    return sum(verdict is not None and verdict.both for verdict in verdicts) / len(verdicts)


def _most_frequent_of_each_kind(known: Sequence[Question]) -> list[str]:
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for question in known:
        by_kind[question.fact.kind][question.fact.answer] += 1
    return [answers.most_common(1)[0][0] for answers in by_kind.values()]


@cache
def _named() -> frozenset[str]:
    named = (text for fact in facts() for text in fact.subject)
    return frozenset(word for text in named for word in all_words(text)) | frozenset(NUMBERS)
