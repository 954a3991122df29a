"""What a classifier computes of many sequences, shared out among the processes.

Dimension names: S sequences, C outputs.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.data.batches import collate_part, local_micro_batches
from pipeline.data.examples import Encoded
from pipeline.models.forward import LabelOutputs, Scorer
from pipeline.models.trained import evaluating
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh


def outputs_of(scorer: Scorer, sequences: Sequence[Encoded], *, max_tokens: int) -> LabelOutputs:
    """The outputs at the end of each sequence, on the CPU of every process, which all call it.

    Args:
        scorer: the model.
        sequences: the same on all processes.
        max_tokens: of a micro-batch.
    """
    data = current_mesh().data
    own = data.share(range(len(sequences)))
    found: list[tuple[int, list[float]]] = []
    cutpoints: Tensor | None = None
    with evaluating(scorer):
        lengths = [len(sequences[place]) for place in own]
        for part in local_micro_batches(lengths, max_tokens=max_tokens):
            rows = [sequences[own[place]] for place in part]
            batch = collate_part(rows, spare=sequences[0]).to(local_device())
            outputs = scorer.final_outputs(batch)
            logits = outputs.logits[: len(part)].tolist()
            found += zip((own[place] for place in part), logits, strict=True)
            cutpoints = outputs.cutpoints
    by_place = dict(pair for of_process in data.gather_objects(found) for pair in of_process)
    logits = torch.tensor([by_place[place] for place in range(len(sequences))])
    return LabelOutputs(logits, None if cutpoints is None else cutpoints.float().cpu())


def scores_of(outputs: LabelOutputs, values: Sequence[float]) -> Float[Tensor, " S"] | None:
    """The score of each sequence; None where several classes have no values."""
    if outputs.logits.shape[1] == 1:
        return outputs.logits.squeeze(1)
    return outputs.logits.softmax(dim=1) @ torch.tensor(values) if values else None
