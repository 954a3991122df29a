"""Measure a reward model on labeled rows; the result is one JSON object.

Dimension names: N rows, C outputs of the model, M labeled steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.config import EMBEDDED, DataConfig, FrozenModelConfig, RowColumns
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Encoded, Example, Message
from pipeline.data.rows.named import named_set
from pipeline.data.rows.shapes import check_columns, read_row
from pipeline.data.rows.sources import read_source
from pipeline.data.sharing.steps import embedded_examples
from pipeline.models.forward.forward import Scorer, base_model, context_length
from pipeline.models.hf.chat import check_ready
from pipeline.models.hf.load import load_reward
from pipeline.system.errors import DataError
from step2_reward.config import LabConfig, RewardConfig
from step2_reward.lab.figures import (
    calibrate,
    class_report,
    concordance,
    first_errors,
    fraction,
    length_bias,
    order_credit,
    spearman,
)
from step2_reward.labels import (
    LOSSES,
    REQUIRED,
    SINGLE_KINDS,
    Labels,
    detect_kind,
    has_label_kind,
    require_listed,
)
from step2_reward.objectives import HeldOutOutputs, compute_outputs, make_objective, predicted_steps
from step2_reward.rows import (
    UNLIMITED,
    Row,
    encode_rows,
    get_responses,
    get_target,
    split_steps,
)

Metrics = dict[str, Any]
Measurement = tuple[Metrics, list[Metrics]]
"""The metrics, and a record for each row: the row, its scores and its prediction."""

PROBES = ("no_end", "truncated", "doubled")
"""Perturbations of a good response: end-of-turn token removed, second half removed, and whole
response repeated."""

MAX_PROBED = 256
"""Maximum number of responses to perturb; each needs four passes, for itself and its versions."""


def measure(
    held_out: HeldOutOutputs,
    labels: Labels,
    examples: Sequence[Example],
    chat: ChatFormat,
    config: RewardConfig,
    *,
    scorer: Scorer | None = None,
) -> Measurement:
    """Measure a model on rows with one kind of label.

    Args:
        held_out: the encoded rows, with the model's outputs.
        labels: the labels that the model was trained on.
        examples: the rows.
        chat: the model's chat format.
        config: settings of step 2.
        scorer: the model, for scoring perturbed responses; None omits them.
    """
    encoded = held_out.rows
    metrics: Metrics = {"labels": labels.kind, "rows": len(examples)}
    if labels.kind == "steps":
        lines = [
            describe_steps(example, row, logits, config.step_separator)
            for example, row, logits in zip(examples, encoded, held_out.outputs, strict=True)
        ]
        return metrics | compute_step_metrics(held_out), lines
    lengths = [
        response_lengths(example, row, labels, chat, config)
        for example, row in zip(examples, encoded, strict=True)
    ]
    scores = None
    if labels.gives_scores:
        scores = [score_outputs(torch.tensor(row), labels).tolist() for row in held_out.outputs]
    if labels.kind in SINGLE_KINDS:
        metrics |= compute_single_metrics(labels, held_out, scores)
    else:
        assert scores is not None
        metrics |= compute_pair_metrics(scores, lengths)
    if scores is not None and scorer is not None:
        std = torch.tensor([score for row in scores for score in row]).std(correction=0).item()
        good = find_good_rows(labels, examples)[:MAX_PROBED]
        metrics["probes"] = compute_probe_metrics(scorer, labels, good, chat, config, std=std)
    lines = [
        describe_row(labels, held_out, index, example, lengths[index], scores)
        for index, example in enumerate(examples)
    ]
    return metrics, lines


def score_outputs(logits: Float[Tensor, "N C"], labels: Labels) -> Float[Tensor, " N"]:
    """Convert the model's outputs to scores: the only output, or the expected class value."""
    if labels.kind != "classes":
        return logits.squeeze(1)
    return logits.softmax(dim=1) @ torch.tensor(labels.values)


def compute_step_metrics(held_out: HeldOutOutputs) -> Metrics:
    """Compute metrics of responses with step labels."""
    predicted = predicted_steps(held_out)
    logits = torch.tensor([logit for row in predicted for logit in row.logits])  # (M,)
    wrong = torch.tensor([int(target < 0.5) for row in predicted for target in row.targets])
    pair_logits = torch.stack([logits, torch.zeros_like(logits)], dim=1)
    errors = first_errors(predicted)
    count = errors["with_error"] + errors["without_error"]
    right = float(errors["found"] + errors["kept"])
    return {
        **compute_class_metrics(
            pair_logits.log_softmax(dim=1), wrong, ("right", "wrong"), key="step_accuracy"
        ),
        "first_errors": errors | {"accuracy": fraction(right, count)},
        "calibration": calibrate(pair_logits, wrong),
    }


def response_lengths(
    example: Example, row: Row, labels: Labels, chat: ChatFormat, config: RewardConfig
) -> list[int]:
    """Return the number of tokens in each response before truncation."""
    lengths = [len(sequence) for sequence in row.sequences]
    if max(lengths) >= config.data.max_length:
        (full,) = encode_rows([example], labels, chat, max_length=UNLIMITED)
        lengths = [len(sequence) for sequence in full.sequences]
    prompt = len(chat.encode_prompt(example.prompt)) if example.prompt else 0
    return [length - prompt for length in lengths]


def compute_pair_metrics(
    scores: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]]
) -> Metrics:
    """Compute metrics of pairs, in which the better response comes first."""
    differences = [chosen - rejected for chosen, rejected in scores]
    logits = torch.tensor([[difference, 0.0] for difference in differences])
    return {
        "accuracy": fraction(sum(map(order_credit, differences)), len(differences)),
        "calibration": calibrate(logits, torch.zeros(len(logits), dtype=torch.int64)),
        "length": length_bias([(*row, (1.0, 0.0)) for row in zip(scores, lengths, strict=True)]),
    }


def compute_single_metrics(
    labels: Labels, held_out: HeldOutOutputs, scores: Sequence[Sequence[float]] | None
) -> Metrics:
    """Compute metrics of single responses with a label."""
    targets = held_out.targets
    metrics: Metrics = {}
    if labels.kind == "classes":
        logprobs = held_out.first_outputs.log_softmax(dim=1)
        metrics |= compute_class_metrics(logprobs, targets.long(), labels.classes)
        metrics["calibration"] = calibrate(logprobs, targets.long())
    if labels.kind != "classes" and scores is not None:
        values = torch.tensor(scores).squeeze(1)
        metrics["concordance"] = concordance(values, targets)
        metrics["spearman"] = spearman(values, targets)
    if labels.kind == "scalar":
        numbers = held_out.first_outputs.squeeze(1)
        numbers = numbers if labels.loss == "mse" else numbers.sigmoid()
        metrics["mean_error"] = (numbers - targets).abs().mean().item() * labels.std
    return metrics


def compute_class_metrics(
    logprobs: Float[Tensor, "N C"], classes: Tensor, names: Sequence[str], *, key: str = "accuracy"
) -> Metrics:
    """Return the class report, and under `key` the accuracy with its interval."""
    report = class_report(logprobs, classes, names)
    right = sum(row[index] for index, row in enumerate(report["confusion"]))
    return {key: fraction(float(right), len(classes)), **report}


def compute_probe_metrics(
    scorer: Scorer,
    labels: Labels,
    examples: Sequence[Example],
    chat: ChatFormat,
    config: RewardConfig,
    *,
    std: float,
) -> Metrics:
    """Measure how each perturbation changes the scores of good responses.

    Returns:
        For each perturbation: change, the mean change of the score in units of `std`; lower, the
            fraction of responses that score lower; responses, the number of responses.
    """
    versions = [change_response(x, chat, max_length=config.data.max_length) for x in examples]
    rows = [Row((sequence,)) for row_versions in versions for sequence in row_versions]
    if not rows:
        return {}
    scores = score_outputs(compute_outputs(scorer, rows, config).first_outputs, labels)
    original, *changed = scores.view(-1, 1 + len(PROBES)).T
    return {
        name: {
            "change": (after - original).double().mean().item() / (std or 1.0),
            "lower": (after < original).double().mean().item(),
            "responses": len(original),
        }
        for name, after in zip(PROBES, changed, strict=True)
    }


def change_response(example: Example, chat: ChatFormat, *, max_length: int) -> list[Encoded]:
    """Return a row's chosen response, followed by its perturbed versions in the order of `PROBES`.

    The list is empty if the prompt or a finished response is missing, or a version is too long.
    """
    if len(example.chosen) != 1 or not example.prompt:
        return []
    full = chat.encode(example.prompt, example.chosen)
    start = len(chat.encode_prompt(example.prompt))
    response = full.input_ids[start:]
    if len(response) < 3 or response[-1] not in chat.stop_ids:
        return []
    text = example.chosen[0].content
    half = response[: (len(response) - 1) // 2]
    versions = [
        full,
        Encoded.untrained(full.input_ids[:-1]),
        Encoded.untrained([*full.input_ids[:start], *half, response[-1]]),
        chat.encode(example.prompt, (Message("assistant", f"{text} {text}"),)),
    ]
    return versions if max(map(len, versions)) <= max_length else []


def find_good_rows(labels: Labels, examples: Sequence[Example]) -> Sequence[Example]:
    """Return the rows with a good response: chosen, of the best class, or not below the median."""
    if labels.kind not in SINGLE_KINDS:
        return examples
    targets = [get_target(example, labels) for example in examples]
    if labels.kind == "classes":
        best = max(range(len(labels.values)), key=lambda index: labels.values[index])
        return [row for row, target in zip(examples, targets, strict=True) if target == best]
    median = sorted(targets)[len(targets) // 2]
    return [row for row, target in zip(examples, targets, strict=True) if target >= median]


def describe_steps(
    example: Example, row: Row, logits: Sequence[Sequence[float]], separator: str
) -> Metrics:
    """Describe a row of steps, and the probability that each labeled step is correct."""
    labeled = [index for index, label in enumerate(example.step_labels) if label is not None]
    probabilities: list[float | None] = [None] * len(example.steps)
    # Truncated rows have lost their first steps.
    for index, (logit,) in zip(reversed(labeled), reversed(logits), strict=False):
        probabilities[index] = torch.tensor(logit).sigmoid().item()
    (steps,) = predicted_steps(HeldOutOutputs([row], [logits]))
    return {
        **_describe_prompt(example),
        "steps": split_steps(example, separator),
        "labels": list(example.step_labels),
        "probabilities": probabilities,
        "right": steps.first_predicted_error == steps.first_error,
    }


def describe_row(
    labels: Labels,
    held_out: HeldOutOutputs,
    index: int,
    example: Example,
    lengths: Sequence[int],
    scores: Sequence[Sequence[float]] | None,
) -> Metrics:
    """Describe a row, its scores, and the model's prediction."""
    line = _describe_prompt(example) | {
        "responses": [
            "\n\n".join(turn.content for turn in text) for text in get_responses(example, labels)
        ],
        "tokens": lengths,
    }
    if scores is not None:
        line["scores"] = scores[index]
    logits = torch.tensor(held_out.outputs[index])
    if labels.kind == "classes":
        probabilities = logits[0].softmax(dim=0)
        line["label"] = labels.classes[labels.class_index(example)]
        line["predicted"] = labels.classes[int(probabilities.argmax())]
        line["probabilities"] = dict(zip(labels.classes, probabilities.tolist(), strict=True))
    elif labels.kind == "scalar":
        number = logits[0, 0]
        number = number * labels.std + labels.mean if labels.loss == "mse" else number.sigmoid()
        line |= {"label": example.label, "predicted": number.item()}
    else:
        line["right"] = int(logits[:, 0].argmax()) == 0
    return line


def _describe_prompt(example: Example) -> Metrics:
    return {"origin": example.origin, "prompt": [turn.turn for turn in example.prompt]}


MICRO_BATCH_SIZE = 16
"""Number of dialogues per micro-batch."""


def measure_model(config: LabConfig) -> Measurement:
    """Measure the model at `config.path`.

    Raises:
        ModelError: there is no model, or it is not a classifier.
        DataError: there are no rows, or none with the labels that the model was trained on.
    """
    check_ready(config.path, reward_model=True)
    examples = read_examples(config)
    model, tokenizer = load_reward(FrozenModelConfig(path=str(config.path)))
    chat = resolve_format(tokenizer, "auto")
    settings = RewardConfig(
        data=DataConfig(max_length=min(config.max_length, context_length(base_model(model)))),
        micro_batch_size=MICRO_BATCH_SIZE,
        step_separator=getattr(model.config, "step_separator", "\n"),
    )
    labels = read_labels(model.config, examples, settings)
    rows = [row for row in examples if has_label_kind(labels.kind, row)][: config.rows]
    if not rows:
        raise DataError(
            f"data_path {config.data_path}: none of the {len(examples)} rows has"
            f" {REQUIRED[labels.kind]}, which a model trained on labels of kind {labels.kind} needs"
        )
    if labels.kind == "classes":
        require_listed(rows, labels.classes, "the model's classes")
    scorer = Scorer(model)
    encoded = make_objective(labels, settings).encode(rows, chat, settings)
    held_out = compute_outputs(scorer, encoded, settings)
    return measure(held_out, labels, rows, chat, settings, scorer=scorer)


def read_examples(config: LabConfig) -> list[Example]:
    """Read all usable rows of the data path, or of its test split if it has one."""
    if config.data_path == EMBEDDED:
        return embedded_examples(step=2, seed=0)[1]
    source = read_source(config.data_path, step=2)
    rows = source.eval or source.train
    if config.fields:
        check_columns([row.columns for row in rows], config.fields)
    reader = None if config.fields else named_set(source.name)
    kept = RowColumns(labels=True)
    examples = [
        reader.read(row) if reader else read_row(row, config.fields, kept=kept) for row in rows
    ]
    return [row for row in examples if row]


def read_labels(model_config: object, examples: Sequence[Example], config: RewardConfig) -> Labels:
    """Read the model's labels from its config.json, or else detect them from the rows."""
    kind = getattr(model_config, "label_kind", None)
    if kind not in LOSSES:
        kind = detect_kind(config, examples)
        if getattr(model_config, "num_labels", 1) > 1:
            kind = "classes"
        elif kind == "classes":
            kind = "scalar"
    if kind == "classes":
        names: Mapping[int, str] = getattr(model_config, "id2label", None) or {}
        classes = tuple(getattr(model_config, "class_list", ())) or tuple(names.values())
        values = tuple(getattr(model_config, "class_values", ()))
        return Labels(kind, "cross_entropy", classes, values)
    if kind == "scalar":
        mean, std = (getattr(model_config, name, None) for name in ("label_mean", "label_std"))
        if mean is None or std is None:
            return Labels(kind, "bce")
        return Labels(kind, "mse", mean=mean, std=std)
    if kind == "steps":
        return Labels(kind, "bce")
    return Labels("pairs", "bradley_terry")
