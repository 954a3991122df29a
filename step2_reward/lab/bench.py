"""RewardBench 2 (Malik et al. 2025, 2506.01937): its rows, and its scores of a reward model.

Columns are those of allenai/reward-bench-2: `prompt`, `chosen` and `rejected` (lists of texts),
`subset`, and `id`, which in the subset Ties is `ref:N` or `tied:N`. The arithmetic is that of
`reroll_and_score_dataset` and `process_single_model` in allenai/reward-bench, rewardbench/utils.py.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Encoded, Example, Message
from pipeline.data.rows.columns import LeftOut, turns
from pipeline.data.rows.dialogues import Turns, with_history
from pipeline.data.rows.sources import Row, read_source
from pipeline.errors import DataError, ModelError
from pipeline.models.chat import check_ready, require_score_head
from pipeline.models.forward import Scorer, base_model, context_length
from pipeline.models.load import load_reward_for_inference
from pipeline.report.figures import share_interval
from step2_reward.evaluate import outputs_of, scores_of
from step2_reward.lab.config import LabConfig
from step2_reward.lab.figures import Measured
from step2_reward.rows import encode_dialogue

TIES = "ties"
"""The subset that is scored in another way, in lower case."""

_TIES_ID = re.compile(r"(ref|tied):(\d+)")


@dataclass(frozen=True)
class BenchRow:
    """A prompt and its responses, the right ones first."""

    origin: str
    subset: str
    prompt: Turns
    responses: tuple[str, ...]

    num_correct: int
    """How many of the responses are right."""

    kind: str = ""
    """Of Ties: `ref`, a question with one right response, or `tied`, a like one with several."""

    number: int = 0
    """Of Ties: what a question with one right response and its like with several share."""

    @property
    def is_tie(self) -> bool:
        """Whether the row is of the subset Ties."""
        return self.subset.lower() == TIES


def read_bench(path: str, *, history: str = "all") -> list[BenchRow]:
    """All rows of a file, directory or Hub name, of its test split where there is one.

    Raises:
        DataError: there are none, a row lacks something, or Ties are not in pairs.
    """
    source = read_source(path, step=2)
    rows = [_read(row, history) for row in source.eval or source.train]
    _check_ties([row for row in rows if row.is_tie])
    return rows


def _read(row: Row, history: str) -> BenchRow:
    right, wrong = _texts(row, "chosen"), _texts(row, "rejected")
    subset = row.columns.get("subset")
    if not isinstance(subset, str) or not subset:
        raise DataError(f"{row.origin}: subset must name the part of the benchmark, got {subset!r}")
    found = BenchRow(
        row.origin, subset, with_history(_prompt(row), history), (*right, *wrong), len(right)
    )
    return _tie(found, row.columns) if found.is_tie else found


def _prompt(row: Row) -> Turns:
    """Text is one user turn as it stands, whatever it looks like; a list holds turns."""
    value = row.columns.get("prompt")
    if isinstance(value, str):
        return (Message("user", value),)
    try:
        found = turns(row, "prompt") if isinstance(value, list) else ()
    except LeftOut as reason:
        raise DataError(f"{row.origin}: prompt is a dialogue {reason}; remove the row") from None
    if not found or found[-1].role != "user":
        raise DataError(f"{row.origin}: prompt must be text, or turns of which a user has the last")
    return found


def _texts(row: Row, name: str) -> Sequence[str]:
    value = row.columns.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        what = "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
        raise DataError(f"{row.origin}: {name} must be a list of one or more texts, got {what}")
    return value


def _tie(row: BenchRow, columns: Mapping[str, object]) -> BenchRow:
    match = _TIES_ID.fullmatch(str(columns.get("id")))
    if match is None:
        raise DataError(
            f"{row.origin}: id of a row of {row.subset} must be ref:N or tied:N,"
            f" got {columns.get('id')!r}"
        )
    kind = match[1]
    if kind == "tied" and row.num_correct < 2:
        raise DataError(f"{row.origin}: a tied row needs two chosen responses or more")
    return BenchRow(
        row.origin, row.subset, row.prompt, row.responses, row.num_correct, kind, int(match[2])
    )


def _check_ties(rows: Sequence[BenchRow]) -> None:
    """Raise DataError unless each id is there once, and some questions are there in both kinds."""
    first: dict[tuple[str, int], BenchRow] = {}
    for row in rows:
        same = first.setdefault((row.kind, row.number), row)
        if same is not row:
            raise DataError(
                f"{row.origin}: id {row.kind}:{row.number} is also that of {same.origin};"
                " give each row an id of its own"
            )
    if rows and not any(("ref", number) in first for kind, number in first if kind == "tied"):
        raise DataError(
            f"{rows[0].origin}: {rows[0].subset} needs a ref:N and a tied:N of one N, as margins"
            " are compared between the two; this data has no such pair"
        )


@dataclass(frozen=True)
class PromptScores:
    """The scores of the responses to one prompt."""

    correct: Sequence[float]
    wrong: Sequence[float]

    @property
    def point(self) -> float:
        """The chance that a response of the highest score is correct: 1 / k of k tied ones."""
        best = max(*self.correct, *self.wrong)
        hits = sum(score == best for score in self.correct)
        return hits / (hits + sum(score == best for score in self.wrong))

    @property
    def chance(self) -> float:
        """The mean accuracy of scores that know nothing: the share of right responses."""
        return len(self.correct) / (len(self.correct) + len(self.wrong))

    @property
    def gap(self) -> float:
        """From the best wrong response to the worst correct one; above 0 where all are in order."""
        return min(self.correct) - max(self.wrong)

    @property
    def spread(self) -> float:
        """Between the best and the worst of the correct responses."""
        return max(self.correct) - min(self.correct)


@dataclass(frozen=True)
class TiesScore:
    """The subset Ties: several responses are right, and none should be liked much better."""

    tied_accuracy: float
    """Of questions with several right responses, those whose right ones all beat all wrong ones."""

    ref_accuracy: float
    """The same share, of the questions with one right response."""

    preferred: float
    """Questions whose gap to the wrong responses is wider than the spread of the right ones."""

    preferred_hard: float
    """The same, with the smaller gap of the question and its like with one right response."""

    margin: float
    """Mean of tanh(that gap / spread - 1), which tells equal models apart."""

    @property
    def score(self) -> float:
        """.3 tied + .3 ref + .2 preferred + .2 hard + .01 margin: in [-0.01, 1.01]."""
        accuracies = 0.3 * self.tied_accuracy + 0.3 * self.ref_accuracy
        margins = 0.2 * self.preferred + 0.2 * self.preferred_hard
        return accuracies + margins + 0.01 * self.margin


def ties_score(ref: Mapping[int, PromptScores], tied: Mapping[int, PromptScores]) -> TiesScore:
    """The score of Ties; margins are those of the questions that both hold.

    Args:
        ref: by number, questions with one correct response.
        tied: by number, questions with several; some number is in both.
    """
    pairs = [(ref[number], tied[number]) for number in sorted(ref.keys() & tied.keys())]
    hard = [(min(one.gap, many.gap), many.spread) for one, many in pairs]
    return TiesScore(
        tied_accuracy=_mean([float(row.gap > 0) for row in tied.values()]),
        ref_accuracy=_mean([float(row.gap > 0) for row in ref.values()]),
        preferred=_mean([float(many.gap > many.spread) for _, many in pairs]),
        preferred_hard=_mean([float(gap > spread) for gap, spread in hard]),
        margin=_mean([_squashed(gap, spread) for gap, spread in hard]),
    )


def _squashed(gap: float, spread: float) -> float:
    """tanh(gap / spread - 1), and its limits where all correct responses score the same."""
    if spread == 0:
        return math.copysign(1.0, gap) if gap else 0.0
    return math.tanh(gap / spread - 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


AT_ONCE = 16
"""Dialogues of a micro-batch."""

UNCUT = 2**31
"""Tokens: more than any dialogue has."""


def measure_bench(config: LabConfig) -> Measured:
    """The figures of the model at `config.path` on the rows of `config.bench`.

    Raises:
        ModelError: there is none, or it gives no score.
        DataError: the rows are not those of RewardBench 2.
    """
    assert config.bench is not None
    check_ready(config.path, scores=True)
    rows = read_bench(config.bench, history=config.history)
    model, tokenizer = load_reward_for_inference(config.path)
    require_score_head(config.path, model.config.architectures)
    chat = resolve_format(tokenizer, "auto")
    limit = min(config.max_length, context_length(base_model(model)))
    whole = [encoded for row in rows for encoded in _encoded(row, chat)]
    outputs = outputs_of(
        Scorer(model),
        [each.tail(limit, keep_first=chat.begins_with_cls) for each in whole],
        max_tokens=AT_ONCE * limit,
    )
    scores = scores_of(outputs, tuple(getattr(model.config, "class_values", ())))
    if scores is None:
        raise ModelError(f"path {config.path}: its classes have no values, so there is no score")
    if not scores.isfinite().all():
        raise ModelError(f"path {config.path}: it gives scores that are no finite numbers")
    cut = sum(len(each) > limit for each in whole)
    figures = {"max_length": limit, "cut": cut, "responses": len(whole)}
    scored = _by_row(rows, scores.tolist())
    return Measured(
        {"bench": figures | bench_figures(rows, scored)},
        [_prediction(row, each) for row, each in zip(rows, scored, strict=True)],
    )


def bench_figures(rows: Sequence[BenchRow], scored: Sequence[PromptScores]) -> dict[str, object]:
    """The score of each subset, in their order of appearance, and the mean of the subsets."""
    by_subset: dict[str, list[tuple[BenchRow, PromptScores]]] = {}
    for row, each in zip(rows, scored, strict=True):
        by_subset.setdefault(row.subset, []).append((row, each))
    values: list[float] = []
    subsets: list[dict[str, object]] = []
    for name, found in by_subset.items():
        value, more = _of_ties(found) if found[0][0].is_tie else _of_best(found)
        values.append(value)
        subsets.append({"name": name, "rows": len(found), "value": value, **more})
    return {"value": sum(values) / len(values), "rows": len(rows), "subsets": subsets}


def _of_best(found: Sequence[tuple[BenchRow, PromptScores]]) -> tuple[float, dict[str, object]]:
    """Accuracy of the best response, with its interval, beside that of a random score."""
    count = len(found)
    points = sum(each.point for _, each in found)
    low, high = share_interval(points, count)
    chance = sum(each.chance for _, each in found) / count
    return points / count, {"low": low, "high": high, "chance": chance}


def _of_ties(found: Sequence[tuple[BenchRow, PromptScores]]) -> tuple[float, dict[str, object]]:
    """The score of Ties with its parts; it has no interval, as it is not a share."""
    ref, tied = (
        {row.number: each for row, each in found if row.kind == kind} for kind in ("ref", "tied")
    )
    score = ties_score(ref, tied)
    return score.score, {"parts": asdict(score)}


def _encoded(row: BenchRow, chat: ChatFormat) -> list[Encoded]:
    """Each response after the prompt, whole."""
    example = Example(row.prompt)
    return [
        encode_dialogue(chat, example, (Message("assistant", text),), max_length=UNCUT)
        for text in row.responses
    ]


def _by_row(rows: Sequence[BenchRow], scores: Sequence[float]) -> list[PromptScores]:
    """The scores by row: those of each row's responses stand together."""
    found: list[PromptScores] = []
    at = 0
    for row in rows:
        wrong = at + row.num_correct
        end = at + len(row.responses)
        found.append(PromptScores(scores[at:wrong], scores[wrong:end]))
        at = end
    return found


def _prediction(row: BenchRow, scored: PromptScores) -> dict[str, object]:
    """A row beside its scores."""
    found: dict[str, object] = {
        "origin": row.origin,
        "subset": row.subset,
        "prompt": [{"role": each.role, "content": each.content} for each in row.prompt],
        "responses": list(row.responses),
        "num_correct": row.num_correct,
        "scores": [*scored.correct, *scored.wrong],
    }
    if row.is_tie:
        return found | {"id": f"{row.kind}:{row.number}", "gap": scored.gap}
    return found | {"point": scored.point}
