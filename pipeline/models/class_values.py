"""The score of a classifier of several classes: the expected value of its class.

Dimension names: N tokens, C classes.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.errors import ModelError


def expected_value(
    logits: Float[Tensor, "N C"], classifier: PreTrainedModel
) -> Float[Tensor, " N"]:
    """The one output, or sum_k u_k p_k over several labels, u their values in config.json.

    Raises:
        ModelError: several labels have no values.
    """
    if logits.shape[-1] == 1:
        return logits.squeeze(-1)
    values = class_values(classifier, logits.shape[-1])
    return logits.softmax(dim=-1) @ torch.tensor(values, device=logits.device)


def require_score(classifier: PreTrainedModel) -> None:
    """Refuse a classifier that gives no score.

    Raises:
        ModelError: it has several labels without values.
    """
    count = classifier.config.num_labels or 1
    if count > 1:
        class_values(classifier, count)


def class_values(classifier: PreTrainedModel, count: int) -> list[float]:
    """What each of several labels is worth.

    Raises:
        ModelError: config.json doesn't have it.
    """
    values = getattr(classifier.config, "class_values", None)
    if not isinstance(values, list) or len(values) != count:
        raise ModelError(
            f"{classifier.config.name_or_path}: its {count} classes have no values, so that it"
            " gives no score; train it with reward.class_values, or write class_values, a list of"
            f" {count} numbers, into its config.json"
        )
    return [float(value) for value in values]
