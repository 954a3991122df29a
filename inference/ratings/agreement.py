"""How far ratings can be trusted: agreement of raters, and what choices go by besides quality."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from inference.ratings.file import Rating

TIE, BAD = "tie", "both bad"


@dataclass(frozen=True)
class Agreement:
    """Figures of a file of ratings; None where there is nothing to compute one from."""

    ratings: int
    pairs: int
    """Two responses compared; ties and both bad among them."""
    blind: int
    """Pairs with a choice that were shown without names, in random order."""
    left: float | None
    """Share of blind pairs whose left response was chosen; 0.5 without a bias of place."""
    longer: float | None
    """Share of pairs with a choice whose longer response was chosen."""
    self_agreement: float | None
    """Share of pairs that a rater saw again and chose alike."""
    kappa: float | None
    """Agreement of different raters of the same pair beyond chance: Scott's pi (1955) over all two
    of them, which Fleiss (1971) calls kappa."""


def agreement(ratings: Sequence[Rating]) -> Agreement:
    """The figures of ratings that stand."""
    pairs = [each for each in ratings if each["kind"] == "pair"]
    decided = [each for each in pairs if each.get("choice") is not None and not each.get("tie")]
    blind = [each for each in decided if each.get("blind") and len(each.get("shown") or ()) == 2]
    lengths = [[len(answer["text"]) for answer in each["answers"]] for each in decided]
    longer = [
        of_pair[each["choice"]] > of_pair[1 - each["choice"]]
        for each, of_pair in zip(decided, lengths, strict=True)
        if of_pair[0] != of_pair[1]
    ]
    own, others = _compared(pairs)
    return Agreement(
        ratings=len(ratings),
        pairs=len(pairs),
        blind=len(blind),
        left=_share([each["shown"][0] == each["choice"] for each in blind]),
        longer=_share(longer),
        self_agreement=_share([one == other for one, other in own]),
        kappa=_kappa(others),
    )


def label_of(pair: Rating) -> str:
    """What was chosen: a tie, that both are bad, or the first or second response by its letters."""
    if pair.get("tie"):
        return TIE
    if pair.get("choice") is None:
        return BAD
    texts = [answer["text"] for answer in pair["answers"]]
    return "first" if texts[pair["choice"]] == min(texts) else "second"


def item_of(pair: Rating) -> tuple[str, ...]:
    """What was compared, whichever response stood first."""
    prompt = [f"{each['role']}:{each['content']}" for each in pair["messages"]]
    return (*prompt, *sorted(answer["text"] for answer in pair["answers"]))


def _compared(pairs: Sequence[Rating]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Labels of the same item by the same rater, and by two different ones."""
    items: defaultdict[tuple[str, ...], list[tuple[str, str]]] = defaultdict(list)
    for pair in pairs:
        items[item_of(pair)].append((str(pair.get("rater", "")), label_of(pair)))
    own, others = [], []
    for given in items.values():
        for (rater, label), (other, second) in itertools.combinations(given, 2):
            (own if rater == other else others).append((label, second))
    return own, others


def _kappa(labels: Sequence[tuple[str, str]]) -> float | None:
    """(observed - expected agreement) / (1 - expected), expected of labels drawn alike by all."""
    if not labels:
        return None
    observed = sum(one == other for one, other in labels) / len(labels)
    counts = Counter(itertools.chain(*labels))
    expected = sum((count / (2 * len(labels))) ** 2 for count in counts.values())
    return 1.0 if expected == 1.0 else (observed - expected) / (1.0 - expected)


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
