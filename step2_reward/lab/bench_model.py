"""Measuring a model by the rows of RewardBench 2."""

from collections.abc import Sequence
from dataclasses import asdict

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Encoded, Example, Message
from pipeline.errors import ModelError
from pipeline.models.chat import check_ready, require_score_head
from pipeline.models.forward import Scorer, base_model, context_length
from pipeline.models.load import load_reward_for_inference
from pipeline.report.intervals import share_interval
from step2_reward.lab.bench import PromptScores, ties_score
from step2_reward.lab.bench_rows import BenchRow, read_bench
from step2_reward.lab.config import LabConfig
from step2_reward.lab.measure import Measured
from step2_reward.labelled import encode_dialogue
from step2_reward.outputs import outputs_of, scores_of

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
