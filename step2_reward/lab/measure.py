"""Everything the laboratory measures of a reward model on labelled rows, as one JSON object."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.models.forward import LabelOutputs, Scorer
from step2_reward.config import RewardConfig
from step2_reward.lab.calibration import calibrate
from step2_reward.lab.figures import Measured, of_classes, share
from step2_reward.lab.length import LengthBias, Scored, Share, length_bias, ordered_pairs
from step2_reward.lab.measure_steps import measure_steps
from step2_reward.lab.probes import PROBES, probe, probed
from step2_reward.lab.ranks import concordance, spearman
from step2_reward.label_rows import OF_CLASSES, OF_LABELS, Labels
from step2_reward.labelled import LabelledRow, encode_rows, responses_of, target_of
from step2_reward.losses import ordinal_log_probabilities, tie_log_probabilities
from step2_reward.outputs import outputs_of, scores_of

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
