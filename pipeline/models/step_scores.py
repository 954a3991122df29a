"""The score of a response whose steps are scored one by one: a process reward model's.

A step ends at a token that ends in the separator of steps; the last one ends where the response
does. There the model's output is the log-odds that the step is right (Lightman et al. 2023,
2305.20050; Wang et al. 2024, Math-Shepherd, 2312.08935).

Dimension names: N tokens, B sequences.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from pipeline.data.batches import TokenBatch

STEPS = "steps"
"""The `label_kind` in the config.json of a model that scores steps."""


def separator_ids(tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """The tokens that end in the separator; spaces may follow it."""
    count = len(tokenizer)
    texts = tokenizer.batch_decode([[token] for token in range(count)])
    ends = [token for token, text in enumerate(texts) if _ends_in(text, separator)]
    special = set(tokenizer.all_special_ids)
    return [token for token in ends if token not in special]


def _ends_in(text: str, separator: str) -> bool:
    _, found, behind = text.rpartition(separator)
    return bool(found) and not behind.strip()


def step_ends(batch: TokenBatch, separators: Collection[int]) -> list[list[int]]:
    """Where the steps of each sequence's last response end, in the batch.

    The response is the last run of tokens whose prediction counts. A sequence without such tokens
    ends in one step.
    """
    tokens, counted = batch.input_ids.tolist(), set(batch.targets.tolist())
    found: list[list[int]] = []
    start = 0
    for length in batch.lengths:
        stop = start + length
        last = next((at for at in range(stop - 1, start - 1, -1) if at in counted), stop - 1)
        first = last
        while first > start and first - 1 in counted:
            first -= 1
        ends: list[int] = []
        has_text = False
        for at in range(first, last):
            if tokens[at] not in separators:
                has_text = True
            elif has_text:
                ends.append(at)
                has_text = False
        found.append([*ends, last] if has_text or not ends else ends)
        start = stop
    return found


def response_scores(
    scores: Float[Tensor, " N"], batch: TokenBatch, settings: PreTrainedConfig
) -> Float[Tensor, " B"]:
    """The score of each sequence from those of its tokens: the last one's, or of all steps.

    As `step_score` in the settings says, that of the worst step (min), of the last one, or the
    log-probability that all steps are right (product).
    """
    if getattr(settings, "label_kind", None) != STEPS:
        return scores[batch.last_tokens]
    separators = frozenset(settings.step_token_ids)
    pieces = [scores[ends] for ends in step_ends(batch, separators)]
    match settings.step_score:
        case "last":
            return torch.stack([each[-1] for each in pieces])
        case "product":
            return torch.stack([F.logsigmoid(each).sum() for each in pieces])
        case _:
            return torch.stack([each.min() for each in pieces])
