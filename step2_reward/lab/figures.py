"""Figures of a reward model: rank agreement, classes, calibration, length bias, best of n, steps.

Pure functions. Dimension names: N rows or items, C classes. A pair is two classes with the logits
(difference, 0), of which the first is right.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pipeline.report.figures import share_interval


def average_ranks(values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The rank of each value, from 1 upwards; equal values share the mean of their ranks."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - (counts - 1) / 2)[inverse].to(torch.float64)


def spearman(one: Float[Tensor, " N"], other: Float[Tensor, " N"]) -> float:
    """Spearman's rank correlation; 0 where either is constant."""
    first, second = (average_ranks(each) for each in (one, other))
    first, second = first - first.mean(), second - second.mean()
    spread = math.sqrt((first.square().sum() * second.square().sum()).item())
    return (first @ second).item() / spread if spread > 0 else 0.0


def concordance(scores: Float[Tensor, " N"], targets: Float[Tensor, " N"]) -> float:
    """The share of pairs with different targets whose scores are in the same order.

    Equal scores count half; without such a pair it is 1/2.
    """
    right, total = 0.0, 0
    for place in range(len(targets)):  # a row at a time: memory stays linear
        above = targets > targets[place]
        ahead = scores[above]
        right += (ahead > scores[place]).sum().item() + 0.5 * (ahead == scores[place]).sum().item()
        total += int(above.sum())
    return right / total if total else 0.5


def area_under_curve(scores: Float[Tensor, " N"], positive: Bool[Tensor, " N"]) -> float | None:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties half.

    By ranks (Mann and Whitney 1947); None without items of both kinds.
    """
    count = int(positive.sum())
    others = len(positive) - count
    if not count or not others:
        return None
    ranks = average_ranks(scores)[positive].sum().item()
    return (ranks - count * (count + 1) / 2) / (count * others)


@dataclass(frozen=True)
class ClassFigures:
    """Figures of one class against all others."""

    name: str
    rows: int
    precision: float
    """Of rows taken for the class, the share that is of it; 0 where none is."""
    recall: float
    """Of rows of the class, the share that is taken for it."""
    f1: float
    """Harmonic mean of both."""
    auc: float | None
    """None where all rows, or none, are of the class."""


@dataclass(frozen=True)
class ClassReport:
    """What a classifier makes of rows."""

    confusion: list[list[int]]
    """Rows by true class, then by the class they are taken for."""

    classes: list[ClassFigures]

    @property
    def rows(self) -> int:
        """All rows."""
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        """Share of the rows in their class."""
        return sum(row[place] for place, row in enumerate(self.confusion)) / max(1, self.rows)

    @property
    def macro_recall(self) -> float:
        """Mean over the classes that have rows: what always taking the largest has 1/C of."""
        return self._mean("recall")

    @property
    def macro_f1(self) -> float:
        """Mean over the classes that have rows."""
        return self._mean("f1")

    def _mean(self, figure: str) -> float:
        found = [getattr(each, figure) for each in self.classes if each.rows]
        return sum(found) / max(1, len(found))


def class_report(
    logprobs: Float[Tensor, "N C"], classes: Int[Tensor, " N"], names: Sequence[str]
) -> ClassReport:
    """The report on rows of known classes, each taken for its likeliest one."""
    count = len(names)
    taken = logprobs.argmax(dim=1)
    confusion = torch.bincount(classes * count + taken, minlength=count * count)
    matrix: list[list[int]] = confusion.view(count, count).tolist()
    figures: list[ClassFigures] = []
    for place, name in enumerate(names):
        hits, rows = matrix[place][place], sum(matrix[place])
        precision = hits / max(1, sum(row[place] for row in matrix))
        recall = hits / max(1, rows)
        f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
        auc = area_under_curve(logprobs[:, place].double(), classes == place)
        figures.append(ClassFigures(name, rows, precision, recall, f1, auc))
    return ClassReport(matrix, figures)


BINS = 15
"""Bins of equally many rows (Nguyen and O'Connor 2015; 15 as in Guo et al. 2017)."""

COLDEST, HOTTEST = 1e-2, 1e2
"""Temperatures that are looked at: where every row is right, none is too cold."""


@dataclass(frozen=True)
class Bin:
    """Rows of similar confidence."""

    confidence: float
    """Mean probability of the likeliest class."""
    accuracy: float
    """Share of rows of which that class is right."""
    rows: int


@dataclass(frozen=True)
class Calibration:
    """How far probabilities can be believed."""

    ece: float
    """Mean distance of confidence and accuracy over the bins, weighted by rows."""
    ece_raw: float
    """The same at temperature 1."""
    brier: float
    """Mean squared distance of the probabilities from what is right (Brier 1950)."""
    temperature: float
    """By which logits are to be divided; above 1 the model is too sure of itself."""
    bins: list[Bin]


def calibrate(logits: Float[Tensor, "N C"], classes: Int[Tensor, " N"]) -> Calibration:
    """The calibration of probabilities after temperature scaling (Guo et al. 2017, section 4.2).

    A row is never judged by a temperature that it helped to fit: each half of the rows is scaled by
    that of the other half. `temperature` itself is that of all rows.
    """
    logits = logits.double()
    even = torch.arange(len(logits)) % 2 == 0
    scaled = logits.clone()
    for half in (even, ~even):
        if half.any() and not half.all():
            scaled[half] = logits[half] / fit_temperature(logits[~half], classes[~half])
    bins = bins_of(scaled, classes)
    probabilities = scaled.softmax(dim=1)
    distance = (probabilities - F.one_hot(classes, logits.shape[1])).square().sum(dim=1).mean()
    if logits.shape[1] == 2:  # both classes are equally far off: one is counted
        distance = distance / 2
    return Calibration(
        ece=expected_error(bins),
        ece_raw=expected_error(bins_of(logits, classes)),
        brier=distance.item(),
        temperature=fit_temperature(logits, classes),
        bins=bins,
    )


def fit_temperature(logits: Float[Tensor, "N C"], classes: Int[Tensor, " N"]) -> float:
    """The temperature of the least negative log-likelihood, which has one minimum in 1 / T."""

    def nll(inverse: float) -> float:
        return F.cross_entropy(logits * inverse, classes).item()

    return 1 / minimum(nll, 1 / HOTTEST, 1 / COLDEST)


def minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum between two positive ends has it, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    start, end = math.log(low), math.log(high)
    for _ in range(60):
        left, right = end - ratio * (end - start), start + ratio * (end - start)
        if function(math.exp(left)) <= function(math.exp(right)):
            end = right
        else:
            start = left
    return math.exp((start + end) / 2)


def bins_of(
    logits: Float[Tensor, "N C"], classes: Int[Tensor, " N"], count: int = BINS
) -> list[Bin]:
    """Rows by confidence, the least sure first, in bins of equally many.

    A row whose likeliest classes are equally likely is right by the share of them that is.
    """
    probabilities = logits.softmax(dim=1)
    confidence = probabilities.max(dim=1).values
    likeliest = probabilities == confidence[:, None]
    right = likeliest.gather(1, classes[:, None]).squeeze(1) / likeliest.sum(dim=1)
    order = confidence.argsort(stable=True)
    parts = [part for part in order.tensor_split(min(count, max(1, len(order)))) if len(part)]
    return [
        Bin(confidence[part].mean().item(), right[part].double().mean().item(), len(part))
        for part in parts
    ]


def expected_error(bins: list[Bin]) -> float:
    """The expected calibration error: |confidence - accuracy|, weighted by rows."""
    rows = sum(each.rows for each in bins)
    return sum(each.rows * abs(each.confidence - each.accuracy) for each in bins) / max(1, rows)


@dataclass(frozen=True)
class Scored:
    """The responses to one prompt."""

    scores: Sequence[float]
    lengths: Sequence[int]
    """Tokens of each response."""
    worth: Sequence[float]
    """How good the data says each response is: higher is better, equal ones are ties."""


@dataclass(frozen=True)
class Share:
    """A share of pairs that are ordered right."""

    right: float
    pairs: int

    @property
    def value(self) -> float | None:
        """The share; None of no pairs."""
        return self.right / self.pairs if self.pairs else None


@dataclass(frozen=True)
class LengthBias:
    """How scores go with length."""

    spearman: float
    """Rank correlation of score and length within prompts, mean over those whose lengths differ."""
    of_data: float
    """The same of the data's own preference: what a model that is right has."""
    better_longer: Share
    """Pairs whose better response is the longer one."""
    better_shorter: Share
    always_longer: float
    """Accuracy of taking the longer response, ties half: a baseline that reads nothing."""
    always_shorter: float


def length_bias(prompts: Sequence[Scored]) -> LengthBias:
    """The length bias over prompts of two responses or more."""
    longer, shorter, even = _Count(), _Count(), 0
    for prompt in prompts:
        for better, worse in ordered_pairs(prompt.worth):
            difference = prompt.scores[better] - prompt.scores[worse]
            right = 1.0 if difference > 0 else 0.5 if difference == 0 else 0.0
            if prompt.lengths[better] == prompt.lengths[worse]:
                even += 1
            else:
                is_longer = prompt.lengths[better] > prompt.lengths[worse]
                (longer if is_longer else shorter).add(right)
    total = longer.pairs + shorter.pairs + even
    always = (longer.pairs + 0.5 * even) / max(1, total)
    return LengthBias(
        spearman=_within([(each.scores, each.lengths) for each in prompts]),
        of_data=_within([(each.worth, each.lengths) for each in prompts]),
        better_longer=Share(longer.right, longer.pairs),
        better_shorter=Share(shorter.right, shorter.pairs),
        always_longer=always,
        always_shorter=1 - always if total else 0.0,
    )


def ordered_pairs(worth: Sequence[float]) -> list[tuple[int, int]]:
    """(better, worse) of every two responses of different worth."""
    places = range(len(worth))
    return [(one, other) for one in places for other in places if worth[one] > worth[other]]


class _Count:
    def __init__(self) -> None:
        self.right, self.pairs = 0.0, 0

    def add(self, right: float) -> None:
        self.right += right
        self.pairs += 1


def _within(prompts: Sequence[tuple[Sequence[float], Sequence[int]]]) -> float:
    """Mean rank correlation over the prompts of which both vary in length."""
    found = [
        spearman(torch.tensor(values).double(), torch.tensor(lengths).double())
        for values, lengths in prompts
        if len(set(lengths)) > 1
    ]
    return sum(found) / len(found) if found else 0.0


@dataclass(frozen=True)
class BestOf:
    """The best of n responses by the proxy."""

    n: int
    kl: float
    """At most so far from the model that was sampled, in nats: log n - (n - 1) / n."""
    proxy: float
    gold: float


def kl_bound(n: int) -> float:
    """Bound of KL(best-of-n || model) (Stiennon et al. 2020; Beirami et al. 2024, 2401.01879)."""
    return math.log(n) - (n - 1) / n


def best_of(proxy: Sequence[float], gold: Sequence[float], n: int) -> tuple[float, float]:
    """Expected (proxy, gold) of the response that is best by the proxy among n of the samples.

    The unbiased estimator over all subsets (Nakano et al. 2021, 2112.09332, appendix I): with the
    samples in ascending order, the i-th is the best of C(i - 1, n - 1) of the C(N, n) subsets.
    Samples of equal proxy are drawn at random.

    Args:
        proxy: of each of N samples of one prompt.
        gold: of each, the truth.
        n: at most N.
    """
    total = math.comb(len(proxy), n)
    order = sorted(range(len(proxy)), key=lambda place: proxy[place])
    worth = [0.0, 0.0]
    done = 0
    for value, group in groupby(order, key=lambda place: proxy[place]):
        places = list(group)
        weight = (math.comb(done + len(places), n) - math.comb(done, n)) / total
        worth[0] += weight * value
        worth[1] += weight * sum(gold[place] for place in places) / len(places)
        done += len(places)
    return worth[0], worth[1]


def curve(proxies: Sequence[Sequence[float]], golds: Sequence[Sequence[float]]) -> list[BestOf]:
    """Means over prompts at n = 1, 2, 4, ..., N, of N samples for each prompt."""
    most = min(map(len, proxies))
    sizes = sorted(
        {*(2**power for power in range(most.bit_length())), most} & {*range(1, most + 1)}
    )
    found: list[BestOf] = []
    for n in sizes:
        each = [best_of(p, g, n) for p, g in zip(proxies, golds, strict=True)]
        means = [sum(pair[place] for pair in each) / len(each) for place in (0, 1)]
        found.append(BestOf(n, kl_bound(n), means[0], means[1]))
    return found


@dataclass(frozen=True)
class PredictedSteps:
    """The labelled steps of a response."""

    targets: tuple[float, ...]
    """How right each is, from 0 to 1; right from a half on."""

    logits: tuple[float, ...]
    """The model's log-odds that it is."""

    @property
    def first_error(self) -> int | None:
        """The place of the first wrong step; None where all are right."""
        return next((place for place, each in enumerate(self.targets) if each < 0.5), None)

    @property
    def first_found(self) -> int | None:
        """The place of the first step that the model takes for wrong."""
        return next((place for place, each in enumerate(self.logits) if each <= 0), None)


@dataclass(frozen=True)
class FirstErrors:
    """ProcessBench's figures (Zheng et al. 2024, 2412.06559, section 3)."""

    with_error: int
    """Responses with a wrong step."""
    found: int
    """Of these, where the first step that is taken for wrong is the first wrong one."""
    without_error: int
    kept: int
    """Of these, where no step is taken for wrong."""

    @property
    def accuracy(self) -> float:
        """The share of all responses of which both agree."""
        return (self.found + self.kept) / max(1, self.with_error + self.without_error)

    @property
    def f1(self) -> float | None:
        """Harmonic mean of both shares; None where a kind of response is not there."""
        if not self.with_error or not self.without_error:
            return None
        found, kept = self.found / self.with_error, self.kept / self.without_error
        return 2 * found * kept / (found + kept) if found + kept else 0.0


def first_errors(rows: Sequence[PredictedSteps]) -> FirstErrors:
    """How often the first error of a response is found, over those with labelled steps."""
    labelled = [row for row in rows if row.targets]
    wrong = [row for row in labelled if row.first_error is not None]
    right = [row for row in labelled if row.first_error is None]
    return FirstErrors(
        with_error=len(wrong),
        found=sum(row.first_found == row.first_error for row in wrong),
        without_error=len(right),
        kept=sum(row.first_found is None for row in right),
    )


def step_figures(rows: Sequence[PredictedSteps]) -> dict[str, float]:
    """Steps that are predicted right, those of wrong and right steps alike, and first errors."""
    pairs = [pair for row in rows for pair in zip(row.targets, row.logits, strict=True)]
    by_kind = {
        is_right: [logit for target, logit in pairs if (target >= 0.5) == is_right]
        for is_right in (True, False)
    }
    hits = {kind: sum((each > 0) == kind for each in found) for kind, found in by_kind.items()}
    shares = [hits[kind] / len(found) for kind, found in by_kind.items() if found]
    errors = first_errors(rows)
    figures = {
        "accuracy": sum(hits.values()) / max(1, len(pairs)),
        "macro_recall": sum(shares) / max(1, len(shares)),
        "first_error_accuracy": errors.accuracy,
    }
    return figures if errors.f1 is None else {**figures, "first_error_f1": errors.f1}


@dataclass(frozen=True)
class Measured:
    """Rows and what the model makes of them."""

    figures: dict[str, object]
    """As lab.json has them."""

    predictions: list[dict[str, object]]
    """A line for each row: the row, its scores, and what it is taken for."""


def share(right: float, count: int) -> dict[str, float | int]:
    """A share with its 95 % interval (Wilson 1927)."""
    low, high = share_interval(right, count)
    return {"value": right / count, "low": low, "high": high, "count": count}


def of_classes(
    logprobs: Float[Tensor, "N C"], classes: Int[Tensor, " N"], names: Sequence[str]
) -> dict[str, object]:
    """Confusion matrix and what follows from it."""
    report = class_report(logprobs, classes, names)
    key = "outcomes" if names == ("win", "tie", "loss") else "accuracy"
    return {
        key: share(report.accuracy * report.rows, report.rows),
        "macro_recall": report.macro_recall,
        "macro_f1": report.macro_f1,
        "confusion": report.confusion,
        "classes": [asdict(each) for each in report.classes],
    }
