"""Scores of classifiers: expected values of labels and scores of steps.

Dimension names: N tokens, C classes, R rows.
"""

from collections.abc import Collection
from itertools import accumulate

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from pipeline.data.batches import TokenBatch
from pipeline.system.errors import ModelError


def expected_value(
    logits: Float[Tensor, "N C"], classifier: PreTrainedModel
) -> Float[Tensor, " N"]:
    """Return the single output, or the expected value over labels with values in config.json.

    Raises:
        ModelError: there are several labels without values.
    """
    if logits.shape[-1] == 1:
        return logits.squeeze(-1)
    values = class_values(classifier, logits.shape[-1])
    return logits.softmax(dim=-1) @ torch.tensor(values, device=logits.device)


def require_score(classifier: PreTrainedModel) -> None:
    """Reject a classifier that has no score.

    Raises:
        ModelError: the classifier has several labels without values.
    """
    count = classifier.config.num_labels or 1
    if count > 1:
        class_values(classifier, count)


def class_values(classifier: PreTrainedModel, count: int) -> list[float]:
    """Return the value of each of the `count` classes.

    Raises:
        ModelError: config.json doesn't have the values.
    """
    values = getattr(classifier.config, "class_values", None)
    if not isinstance(values, list) or len(values) != count:
        raise ModelError(
            f"{classifier.config.name_or_path} has no values for its {count} classes, so it has no"
            f" score; train it with reward.class_values, or add class_values, a list of {count}"
            " numbers, to its config.json"
        )
    return [float(value) for value in values]


STEPS = "steps"
"""The `label_kind` in the config.json of a model that scores steps."""


def separator_ids(tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """Return the non-special tokens whose text ends with the separator and optional whitespace."""
    vocab_size = len(tokenizer)
    texts = tokenizer.batch_decode([[token] for token in range(vocab_size)])
    ends = [token for token, text in enumerate(texts) if _ends_with_separator(text, separator)]
    special = set(tokenizer.all_special_ids)
    return [token for token in ends if token not in special]


def _ends_with_separator(text: str, separator: str) -> bool:
    _, match, rest = text.rpartition(separator)
    return bool(match) and not rest.strip()


def step_ends(batch: TokenBatch, separators: Collection[int]) -> list[list[int]]:
    """Return, for each row, the batch indices at which its last response's steps end.

    The response is the last run of target tokens. A row without targets has one step.
    """
    tokens, targets = batch.input_ids.tolist(), set(batch.targets.tolist())
    ends_by_row: list[list[int]] = []
    stops = list(accumulate(batch.lengths))
    for row in batch.rows:
        stop = stops[row]
        start = stop - batch.lengths[row]
        last = next((i for i in range(stop - 1, start - 1, -1) if i in targets), stop - 1)
        first = last
        while first > start and first - 1 in targets:
            first -= 1
        ends: list[int] = []
        has_text = False
        for i in range(first, last):
            if tokens[i] not in separators:
                has_text = True
            elif has_text:
                ends.append(i)
                has_text = False
        ends_by_row.append([*ends, last] if has_text or not ends else ends)
    return ends_by_row


def response_scores(
    scores: Float[Tensor, " N"], batch: TokenBatch, settings: PreTrainedConfig
) -> Float[Tensor, " R"]:
    """Return the score of each row: at its last token, or combined over its steps.

    With steps, `step_score` in the settings selects the score of the worst step (min), of the last
    one (last), or the log-probability that all steps are correct (product).
    """
    if getattr(settings, "label_kind", None) != STEPS:
        return scores[batch.last_tokens]
    separators = frozenset(settings.step_token_ids)
    step_scores = [scores[ends] for ends in step_ends(batch, separators)]
    match settings.step_score:
        case "last":
            return torch.stack([scores[-1] for scores in step_scores])
        case "product":
            return torch.stack([F.logsigmoid(scores).sum() for scores in step_scores])
        case _:
            return torch.stack([scores.min() for scores in step_scores])
