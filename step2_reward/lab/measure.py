"""Measurement of a reward model on labelled rows, as one JSON object.

Dimension names: N rows, M labelled steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from inference.generation import generate
from pipeline.config import EMBEDDED, DataConfig, RowColumns
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.embedded import stage_examples
from pipeline.data.examples import Encoded, Example, Message
from pipeline.data.rows.dialogues import with_history
from pipeline.data.rows.named import named_set
from pipeline.data.rows.shapes import check_fields, read_row
from pipeline.data.rows.sources import read_source
from pipeline.demo.task import verify
from pipeline.errors import DataError, ModelError
from pipeline.models.chat import check_ready, decode_response, require_score_head
from pipeline.models.forward import LabelOutputs, Scorer, base_model, context_length
from pipeline.models.load import load_for_inference, load_reward_for_inference
from pipeline.models.scores import Cutpoints
from pipeline.parallel.device import local_device
from step2_reward.config import RewardConfig
from step2_reward.evaluate import outputs_of, scores_of
from step2_reward.lab.config import LabConfig
from step2_reward.lab.figures import (
    LengthBias,
    Measured,
    PredictedSteps,
    Scored,
    Share,
    calibrate,
    concordance,
    curve,
    first_errors,
    length_bias,
    of_classes,
    ordered_pairs,
    share,
    spearman,
)
from step2_reward.label_rows import (
    NEEDS,
    OF_CLASSES,
    OF_LABELS,
    Labels,
    is_of,
    kind_of,
    name_of,
    resolve,
)
from step2_reward.losses import ordinal_log_probabilities, tie_log_probabilities
from step2_reward.rows import LabelledRow, encode_dialogue, encode_rows, responses_of, target_of
from step2_reward.step_objective import StepObjective, step_texts

PROBES = {
    "no_end": "its end-of-turn token removed",
    "truncated": "cut in half, and ended",
    "doubled": "repeated",
}
"""What is done to a response."""


@dataclass(frozen=True)
class Probe:
    """What a change does to scores."""

    change: float
    """Mean of the changed response's score less its own, in standard deviations of scores."""
    lower: float
    """Share of the responses that score lower with it."""
    responses: int


def probed(example: Example, chat: ChatFormat, *, max_length: int) -> dict[str, Encoded] | None:
    """The good response of a row as it is (`whole`) and changed in each way.

    None where there is no response, or where one of them is longer than is read.
    """
    if len(example.chosen) != 1 or not example.prompt:
        return None
    whole = chat.encode(example.prompt, example.chosen)
    start = len(chat.encode_prompt(example.prompt))
    response = whole.input_ids[start:]
    if len(response) < 3 or response[-1] not in chat.stop_ids:
        return None
    text = example.chosen[0].content
    half = response[: (len(response) - 1) // 2]
    found = {
        "whole": whole,
        "no_end": Encoded.untrained(whole.input_ids[:-1]),
        "truncated": Encoded.untrained([*whole.input_ids[:start], *half, response[-1]]),
        "doubled": chat.encode(example.prompt, (Message("assistant", f"{text} {text}"),)),
    }
    return found if max(map(len, found.values())) <= max_length else None


def probe(whole: Sequence[float], changed: Sequence[float], *, std: float) -> Probe:
    """What a change did, from scores before and after it."""
    changes = [after - before for before, after in zip(whole, changed, strict=True)]
    return Probe(
        change=sum(changes) / len(changes) / (std or 1.0),
        lower=sum(each < 0 for each in changes) / len(changes),
        responses=len(changes),
    )


NAMES = ("right", "wrong")


def measure_steps(
    scorer: Scorer,
    labels: Labels,
    examples: Sequence[Example],
    chat: ChatFormat,
    config: RewardConfig,
) -> Measured:
    """The figures of a model on responses in steps; all processes call it."""
    objective = StepObjective(labels, config)
    encoded = objective.encode(examples, chat, config)
    _, predicted = objective.predict(scorer, encoded, config)
    logits = torch.tensor([logit for row in predicted for logit in row.logits])  # (M,)
    wrong = torch.tensor([int(each < 0.5) for row in predicted for each in row.targets])
    both = torch.stack([logits, torch.zeros_like(logits)], dim=1)
    errors = first_errors(predicted)
    found = of_classes(both.log_softmax(dim=1), wrong, NAMES)
    found["step_accuracy"] = found.pop("accuracy")
    count = errors.with_error + errors.without_error
    found["first_errors"] = {
        **asdict(errors),
        "f1": errors.f1,
        "accuracy": share(float(errors.found + errors.kept), count),
    }
    found["calibration"] = asdict(calibrate(both, wrong))
    lines = [
        step_prediction(example, row, config.step_separator)
        for example, row in zip(examples, predicted, strict=True)
    ]
    return Measured({"labels": labels.kind, "rows": len(examples), **found}, lines)


def step_prediction(example: Example, row: PredictedSteps, separator: str) -> dict[str, object]:
    """A row beside the probability that each of its labelled steps is right."""
    labelled = [at for at, label in enumerate(example.step_labels) if label is not None]
    probabilities: list[float | None] = [None] * len(example.steps)
    # What was cut off lies at the beginning.
    for at, logit in zip(reversed(labelled), reversed(row.logits), strict=False):
        probabilities[at] = F.sigmoid(torch.tensor(logit)).item()
    return {
        "origin": example.origin,
        "prompt": [{"role": each.role, "content": each.content} for each in example.prompt],
        "steps": step_texts(example, separator),
        "labels": list(example.step_labels),
        "probabilities": probabilities,
        "right": row.first_found == row.first_error,
    }


MOST_PROBED = 256
"""Responses that are changed and scored again: each takes four passes."""


@dataclass(frozen=True)
class Responses:
    """The responses of a row, and their scores."""

    example: Example
    scores: list[float]
    logits: list[list[float]]
    lengths: list[int]
    ranks: tuple[float, ...]


def measure(
    scorer: Scorer,
    labels: Labels,
    examples: Sequence[Example],
    chat: ChatFormat,
    config: RewardConfig,
) -> Measured:
    """The figures of a model on rows of one kind of label; all processes call it."""
    if labels.kind == "steps":
        return measure_steps(scorer, labels, examples, chat, config)
    limit = config.data.max_length
    encoded = encode_rows(examples, labels, chat, config, max_length=limit)
    flat = [sequence for row in encoded for sequence in row.sequences]
    outputs = outputs_of(scorer, flat, max_tokens=config.micro_batch_size * limit)
    scores = scores_of(outputs, labels.values)
    rows: list[Responses] = []
    at = 0
    for example, row in zip(examples, encoded, strict=True):
        here = slice(at, at := at + len(row.sequences))
        prompt = len(chat.encode_prompt(example.prompt)) if example.prompt else 0
        whole = whole_lengths(example, row, labels, chat, config)
        rows.append(
            Responses(
                example,
                [] if scores is None else scores[here].tolist(),
                outputs.logits[here].tolist(),
                [length - prompt for length in whole],
                row.ranks,
            )
        )
    found: dict[str, object] = {"labels": labels.kind, "rows": len(rows)}
    if labels.kind in OF_LABELS:
        found |= of_labels(labels, examples, outputs, scores)
    else:
        found |= of_orders(labels, rows, outputs)
    if scores is not None:
        found["probes"] = of_probes(scorer, labels, examples, chat, config, scores)
    return Measured(found, [prediction(labels, row, outputs.cutpoints) for row in rows])


def whole_lengths(
    example: Example, row: LabelledRow, labels: Labels, chat: ChatFormat, config: RewardConfig
) -> list[int]:
    """Tokens of each dialogue, those that were cut counted whole."""
    lengths = [len(sequence) for sequence in row.sequences]
    if max(lengths) < config.data.max_length:
        return lengths
    (whole,) = encode_rows([example], labels, chat, config, max_length=2**31)
    return [len(sequence) for sequence in whole.sequences]


def of_orders(
    labels: Labels, rows: Sequence[Responses], outputs: LabelOutputs
) -> dict[str, object]:
    """Figures of responses that are to be put in order."""
    pairs: list[float] = []
    scored: list[Scored] = []
    hits: list[float] = []
    for row in rows:
        worth = [-rank for rank in row.ranks]
        differences = [row.scores[one] - row.scores[two] for one, two in ordered_pairs(worth)]
        pairs += differences
        if differences:
            hits.append(sum((d > 0) + 0.5 * (d == 0) for d in differences) / len(differences))
        scored.append(Scored(row.scores, row.lengths, worth))
    logits = torch.tensor([[difference, 0.0] for difference in pairs])
    firsts = torch.zeros(len(pairs), dtype=torch.int64)
    found: dict[str, object] = {
        # A list counts once, however many pairs it has: its pairs are not independent.
        "accuracy": share(sum(hits), len(hits)),
        "calibration": asdict(calibrate(logits, firsts)),
        "length": of_length(length_bias(scored)),
    }
    if labels.kind == "ties" and outputs.cutpoints is not None:
        chosen, rejected = torch.tensor([row.scores for row in rows]).unbind(1)
        likeliest = tie_log_probabilities(chosen - rejected, outputs.cutpoints[0])
        is_tie = torch.tensor([int(row.example.tie) for row in rows])
        found |= of_classes(likeliest, is_tie, ("win", "tie", "loss"))
        found["kappa"] = outputs.cutpoints[0].item()
    return found


def of_length(bias: LengthBias) -> dict[str, object]:
    """The figures of length bias."""

    def accuracy(of: Share) -> dict[str, float | int] | None:
        return share(of.right, of.pairs) if of.pairs else None

    return {
        "spearman": bias.spearman,
        "of_data": bias.of_data,
        "better_longer": accuracy(bias.better_longer),
        "better_shorter": accuracy(bias.better_shorter),
        "always_longer": bias.always_longer,
        "always_shorter": bias.always_shorter,
    }


def of_labels(
    labels: Labels,
    examples: Sequence[Example],
    outputs: LabelOutputs,
    scores: Float[Tensor, " N"] | None,
) -> dict[str, object]:
    """Figures of single responses with a label."""
    targets = torch.tensor([target_of(example, labels) for example in examples])
    found: dict[str, object] = {}
    if labels.kind in OF_CLASSES:
        logprobs = class_logprobs(labels, outputs.logits, outputs.cutpoints)
        classes = targets.long()
        found |= of_classes(logprobs, classes, labels.classes)
        found["calibration"] = asdict(calibrate(logprobs, classes))
    if labels.kind != "classes" and scores is not None:
        found["concordance"] = concordance(scores, targets)
        found["spearman"] = spearman(scores, targets)
    if labels.kind == "scalar":
        numbers = outputs.logits.squeeze(1)
        numbers = numbers if labels.loss == "mse" else numbers.sigmoid()
        found["mean_error"] = (numbers - targets).abs().mean().item() * labels.std
    return found


def class_logprobs(
    labels: Labels, logits: Float[Tensor, "N C"], cutpoints: Float[Tensor, " cuts"] | None
) -> Float[Tensor, "N classes"]:
    """Log-probabilities of the classes of each row."""
    if labels.kind == "classes":
        return logits.log_softmax(dim=1)
    assert cutpoints is not None
    return ordinal_log_probabilities(logits.squeeze(1), cutpoints)


def of_probes(
    scorer: Scorer,
    labels: Labels,
    examples: Sequence[Example],
    chat: ChatFormat,
    config: RewardConfig,
    scores: Float[Tensor, " S"],
) -> Mapping[str, object]:
    """What changed responses score, by the change."""
    limit = config.data.max_length
    good = good_ones(labels, examples)[:MOST_PROBED]
    changed = [each for each in (probed(e, chat, max_length=limit) for e in good) if each]
    if not changed:
        return {}
    flat: list[Encoded] = [sequence for each in changed for sequence in each.values()]
    outputs = outputs_of(scorer, flat, max_tokens=config.micro_batch_size * limit)
    found = scores_of(outputs, labels.values)
    assert found is not None
    by_name = dict(zip(("whole", *PROBES), found.view(len(changed), -1).T.tolist(), strict=True))
    std = scores.std(correction=0).item()
    return {name: asdict(probe(by_name["whole"], by_name[name], std=std)) for name in PROBES}


def good_ones(labels: Labels, examples: Sequence[Example]) -> Sequence[Example]:
    """The rows whose response is good: chosen, of the best class, or of an upper label."""
    if labels.kind not in OF_LABELS:
        return examples
    targets = [target_of(example, labels) for example in examples]
    if labels.kind == "classes":
        least = max(range(len(labels.values)), key=lambda place: labels.values[place])
        return [row for row, each in zip(examples, targets, strict=True) if each == least]
    least = max(targets) if labels.kind == "ordinal" else sorted(targets)[len(targets) // 2]
    return [row for row, each in zip(examples, targets, strict=True) if each >= least]


def prediction(
    labels: Labels, row: Responses, cutpoints: Float[Tensor, " cuts"] | None
) -> dict[str, object]:
    """A row beside what the model makes of it."""
    example = row.example
    texts, _ = responses_of(example, labels, most=len(row.lengths))
    found: dict[str, object] = {
        "origin": example.origin,
        "prompt": [{"role": each.role, "content": each.content} for each in example.prompt],
        "responses": ["\n\n".join(turn.content for turn in text) for text in texts],
        "tokens": row.lengths,
    }
    if row.scores:
        found["scores"] = row.scores
    if labels.kind in OF_CLASSES:
        probabilities = class_logprobs(labels, torch.tensor(row.logits), cutpoints)[0].exp()
        found["label"] = labels.classes[labels.class_of(example)]
        found["predicted"] = labels.classes[int(probabilities.argmax())]
        found["probabilities"] = dict(zip(labels.classes, probabilities.tolist(), strict=True))
    elif labels.kind in OF_LABELS:
        found["label"] = example.label
        number = torch.tensor(row.logits[0][0])
        number = number * labels.std + labels.mean if labels.loss == "mse" else number.sigmoid()
        found["predicted"] = number.item()
    else:
        found["ranks"] = list(row.ranks)
        best = max(range(len(row.scores)), key=lambda place: row.scores[place])
        found["right"] = row.ranks[best] == min(row.ranks)
    return found


AT_ONCE = 16
"""Dialogues of a micro-batch."""


def measure_model(config: LabConfig) -> Measured:
    """The figures of the model at `config.path`.

    Raises:
        ModelError: there is none, or it is not a classifier.
        DataError: there are no rows, or none with the labels that the model has learned.
    """
    check_ready(config.path, scores=True)
    examples = read_examples(config)
    model, tokenizer = load_reward_for_inference(config.path)
    require_score_head(config.path, model.config.architectures)
    chat = resolve_format(tokenizer, "auto")
    limit = min(config.max_length, context_length(base_model(model)))
    settings = RewardConfig(
        data=DataConfig(max_length=limit),
        micro_batch_size=AT_ONCE,
        step_separator=getattr(model.config, "step_separator", "\n"),
    )
    labels = labels_of(model.config, examples, settings)
    rows = [row for row in examples if is_of(labels.kind, row)][: config.rows]
    if not rows:
        raise DataError(
            f"data_path {config.data_path}: none of its {len(examples)} rows has"
            f" {NEEDS[labels.kind]}, which a model of {labels.kind} is measured by"
        )
    if labels.kind in OF_CLASSES:
        check_classes(labels, rows)
    cutpoints = getattr(model.config, "cutpoints", None)
    scorer = Scorer(
        model,
        cutpoints=Cutpoints(cutpoints, device=local_device(), positive=labels.kind == "ties")
        if cutpoints
        else None,
    )
    measured = measure(scorer, labels, rows, chat, settings)
    if config.actor is not None:
        measured.figures["best_of"] = over_optimization(scorer, labels, chat, config, limit)
    return measured


def read_examples(config: LabConfig) -> list[Example]:
    """All labelled rows of the data path, of its test split where it has one."""
    if config.data_path == EMBEDDED:
        return stage_examples(step=2, seed=config.seed)[1]
    source = read_source(config.data_path, step=2)
    rows = source.eval or source.train
    if config.fields:
        check_fields(config.fields, {name for row in rows for name in row.columns})
    known = None if config.fields else named_set(source.name)
    kept = RowColumns(labels=True)
    found = [known.read(row) if known else read_row(row, config.fields, kept=kept) for row in rows]
    return [
        replace(each, prompt=with_history(each.prompt, config.history)) for each in found if each
    ]


def labels_of(settings: object, examples: Sequence[Example], config: RewardConfig) -> Labels:
    """What the model has learned: step 2 writes it into config.json; else it is as the rows say."""
    kind = getattr(settings, "label_kind", None)
    if kind is None:
        count = getattr(settings, "num_labels", 1)
        if count == 1:
            kind = kind_of(config, examples)
            kind = "scalar" if kind in OF_CLASSES else kind
        else:
            kind = "classes"
    names: dict[int, str] = getattr(settings, "id2label", None) or {}
    classes = tuple(getattr(settings, "class_list", ())) or tuple(names.values())
    values = tuple(getattr(settings, "class_values", ()))
    if kind in OF_CLASSES:
        loss = "cross_entropy" if kind == "classes" else "proportional_odds"
        return Labels(kind, loss, classes, values)
    if kind == "scalar":
        mean, std = (getattr(settings, name, None) for name in ("label_mean", "label_std"))
        if mean is None or std is None:
            return Labels(kind, "bce")
        return Labels(kind, "mse", mean=mean, std=std)
    if kind == "steps":
        return Labels(kind, "bce")
    chosen = replace(config, labels=kind)
    rows = [row for row in examples if is_of(kind, row)]
    return Labels("ties", "rao_kupper") if kind == "ties" else resolve(chosen, rows, [])


def check_classes(labels: Labels, rows: Sequence[Example]) -> None:
    """Raise DataError for a label that is none of the model's classes."""
    for row in rows:
        if name_of(row.label) not in labels.classes:
            raise DataError(
                f"{row.origin}: label {name_of(row.label)} is none of the model's classes,"
                f" {', '.join(labels.classes)}"
            )


def over_optimization(
    scorer: Scorer, labels: Labels, chat: ChatFormat, config: LabConfig, limit: int
) -> list[dict[str, object]]:
    """Proxy and truth of the actor's best of n answers, by the model and by the task's verifier."""
    assert config.actor is not None
    actor, tokenizer = load_for_inference(config.actor)
    own = resolve_format(tokenizer, "auto")
    questions = list(dict.fromkeys(row.prompt for row in stage_examples(step=3, seed=0)[1]))
    questions = questions[: config.prompts]
    slots = [question for question in questions for _ in range(config.best_of)]
    responses = generate(
        actor,
        [own.encode_prompt(question) for question in slots],
        max_new_tokens=64,
        temperature=1.0,
        stop_ids=own.stop_ids,
        seed=config.seed,
        keys=list(range(len(slots))),
    )
    texts = [decode_response(tokenizer, response.ids) for response in responses]
    rows = [
        encode_dialogue(chat, Example(question), (Message("assistant", text),), max_length=limit)
        for question, text in zip(slots, texts, strict=True)
    ]
    scores = scores_of(outputs_of(scorer, rows, max_tokens=AT_ONCE * limit), labels.values)
    if scores is None:
        raise ModelError(f"path {config.path}: its classes have no values, so there is no score")
    verdicts = [verify(q[-1].content, text) for q, text in zip(slots, texts, strict=True)]
    golds = [float(verdict is not None and verdict.both) for verdict in verdicts]

    def by_prompt(values: Sequence[float]) -> list[Sequence[float]]:
        return [values[at : at + config.best_of] for at in range(0, len(values), config.best_of)]

    return [asdict(each) for each in curve(by_prompt(scores.tolist()), by_prompt(golds))]
