"""What a model says of the tokens of a prompt. Dimension names: K targets, V vocabulary."""

from collections.abc import Sequence

import torch

from inference.engine.reported import reported
from inference.engine.requests import Reported
from inference.serve.served import ServedModel
from pipeline.data.batches import TokenBatch
from pipeline.models.forward import Policy

MOST_LOGITS = 2**26
"""Of one pass, in numbers of fp32: 256 MiB, and as much again for log-probabilities."""


@torch.inference_mode()
def prompt_logprobs(
    served: ServedModel, prompt: Sequence[int], num_top: int
) -> list[Reported | None]:
    """What the policy says of each token after those before it; of the first nothing.

    A long prompt is read once for every `MOST_LOGITS` numbers of its logits.
    """
    device = next(served.model.parameters()).device
    ids = torch.tensor(list(prompt), device=device)
    policy = Policy(served.model)
    part = max(1, MOST_LOGITS // served.vocabulary)
    found: list[Reported | None] = [None]
    for first in range(1, len(prompt), part):
        last = min(first + part, len(prompt))
        batch = TokenBatch(ids[:last], (last,), torch.arange(first, last, device=device))
        logits = policy.logits(batch)
        found += reported(logits, list(prompt[first:last]), [num_top] * (last - first))
    return found
