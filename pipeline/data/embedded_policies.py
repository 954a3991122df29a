"""What one can score on the embedded task without understanding a prompt.

Policies that know the training prompts with their right answers, and copy: their rates on the
held-out prompts are what a model's rate has to be read beside.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from random import Random

import numpy as np

from pipeline.data.embedded import judge
from pipeline.data.embedded_facts import POLITE, Question, kinds, split


def trivial_rates() -> dict[str, float]:
    """The judge's rate of each policy on the held-out prompts, every answer polite.

    All kinds count as often in training as in the steps, which draw them alike.
    """
    known, held_out = split()
    asked = [question.text for question in held_out]
    counts = Counter(question.fact.kind for question in known)
    weights = [1 / counts[question.fact.kind] for question in known]
    answers = [question.fact.answer for question in known]
    frequency: dict[str, float] = defaultdict(float)
    for answer, weight in zip(answers, weights, strict=True):
        frequency[answer] += weight
    constants = {
        *(question.fact.answer for question in held_out),
        *_most_frequent_of_each_kind(known),
    }
    random = Random("trivial policies")
    frequent = max(frequency, key=lambda answer: frequency[answer])
    return {
        "best constant answer": max(_rate(asked, [one] * len(asked)) for one in constants),
        "most frequent answer": _rate(asked, [frequent] * len(asked)),
        "random training answer": _rate(asked, random.choices(answers, weights, k=len(asked))),
        "nearest prompt, by its words": _rate(asked, nearest_answers(known, asked)),
    }


def nearest_answers(known: Sequence[Question], asked: Iterable[str]) -> list[str]:
    """For each prompt the answer to the known one that shares most of both prompts' words.

    Nearness is the bags' intersection divided by their union; the first of the nearest counts.
    """
    postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
    sizes = np.empty(len(known))
    for row, question in enumerate(known):
        bag = all_words(question.text)
        sizes[row] = bag.total()
        for word, times in bag.items():
            postings[word].append((row, times))
    rows_and_times = {word: np.array(found).T for word, found in postings.items()}
    answers: list[str] = []
    for text in asked:
        bag = all_words(text)
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


def _rate(asked: Sequence[str], answers: Sequence[str]) -> float:
    """The share of polite answers that the judge finds right."""
    verdicts = [
        judge(text, f"{POLITE[0]} {answer}") for text, answer in zip(asked, answers, strict=True)
    ]
    return sum(verdict is not None and verdict.both for verdict in verdicts) / len(verdicts)


def _most_frequent_of_each_kind(known: Sequence[Question]) -> list[str]:
    by_kind = {kind: Counter[str]() for kind in kinds()}
    for question in known:
        by_kind[question.fact.kind][question.fact.answer] += 1
    return [answers.most_common(1)[0][0] for answers in by_kind.values()]
