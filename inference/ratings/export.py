"""Ratings as rows of preferences and demonstrations, one for each thing that was rated."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inference.ratings.agreement import item_of, label_of
from inference.ratings.file import Rating

Form = Literal["pairs", "hh"]


@dataclass(frozen=True)
class Exported:
    """Rows, and what has none."""

    rows: list[dict[str, Any]]
    undecided: int
    """Pairs in which raters prefer neither response, or as many one as the other."""


def export(ratings: Sequence[Rating], form: Form) -> Exported:
    """The response of each pair that most of its raters prefer, and the corrected responses.

    `pairs` are rows of prompt, chosen, rejected and margin, the mean of its raters' strengths; and
    of prompt and chosen, for a correction or a thumb up. `hh` has chosen and rejected as texts of
    whole dialogues, and pairs alone.
    """
    items: defaultdict[tuple[str, ...], list[Rating]] = defaultdict(list)
    for rating in ratings:
        if rating["kind"] == "pair":
            items[item_of(rating)].append(rating)
    rows, undecided = [], 0
    for given in items.values():
        chosen = _preferred(given)
        if chosen is None:
            undecided += 1
        else:
            rows.append(_pair_row(given, chosen, form))
    if form == "pairs":
        rows += [row for rating in ratings if (row := _demonstration(rating)) is not None]
    return Exported(rows, undecided)


def _preferred(given: Sequence[Rating]) -> Rating | None:
    """A rating that chose what most did; None where none is preferred."""
    votes = Counter(label_of(rating) for rating in given)
    first, second = votes["first"], votes["second"]
    if first == second:
        return None
    label = "first" if first > second else "second"
    return next(rating for rating in given if label_of(rating) == label)


def _pair_row(given: Sequence[Rating], chosen: Rating, form: Form) -> dict[str, Any]:
    better = chosen["answers"][chosen["choice"]]["text"].strip()
    worse = chosen["answers"][1 - chosen["choice"]]["text"].strip()
    if form == "hh":
        return {"chosen": _dialogue(chosen, better), "rejected": _dialogue(chosen, worse)}
    agreeing = [rating for rating in given if label_of(rating) == label_of(chosen)]
    strengths = [rating["strength"] for rating in agreeing if rating.get("strength")]
    margin = {"margin": sum(strengths) / len(strengths)} if strengths else {}
    return {"prompt": chosen["messages"], "chosen": better, "rejected": worse, **margin}


def _demonstration(rating: Rating) -> dict[str, Any] | None:
    if rating["kind"] == "edit":
        return {"prompt": rating["messages"], "chosen": rating["edit"]}
    if rating["kind"] == "thumb" and rating.get("choice") == 1:
        return {"prompt": rating["messages"], "chosen": rating["answers"][0]["text"].strip()}
    return None


def _dialogue(rating: Rating, response: str) -> str:
    names = {"user": "Human", "assistant": "Assistant", "system": "System"}
    turns = [*rating["messages"], {"role": "assistant", "content": response}]
    return "".join(f"\n\n{names[turn['role']]}: {turn['content']}" for turn in turns)


def merge(files: Iterable[Sequence[Rating]]) -> list[Rating]:
    """All ratings of several files, each id once, oldest first."""
    found: dict[str, Rating] = {}
    for ratings in files:
        for rating in ratings:
            found.setdefault(str(rating["id"]), rating)
    return sorted(found.values(), key=lambda rating: str(rating["id"]))


def as_lines(rows: Sequence[Any]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
