"""What an ONNX file computes: (input_ids, attention_mask) -> logits, or a classifier's outputs.

Dimension names: B sequences, T tokens, V vocabulary, C labels.
"""

import inspect
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.models.forward import Backbone, reads_whole, score_head


class ActorGraph(nn.Module):
    """The logits of a language model at every token.

    Positions are counted along the mask, so that padding may be on either side.
    """

    outputs = ("logits",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T V"]:
        """Logits; at tokens whose mask is 0 they mean nothing."""
        positions = positions_along(self.model, attention_mask)
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions
        ).logits


class ClassifierGraph(nn.Module):
    """The outputs of a classifier and, of a reward model, its score.

    A model that reads token by token is read at the last token whose mask is 1, whatever its id: a
    padding token that is also the end of a text is no matter. The score of several labels is
    sum_k u_k p_k, u the `class_values` of config.json.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        values = getattr(model.config, "class_values", None)
        labels = int(model.config.num_labels or 1)
        self.has_values = isinstance(values, list) and len(values) == labels > 1
        # The score of a response in steps takes the outputs at all of their ends.
        of_steps = getattr(model.config, "step_score", "last") != "last"
        has_score = self.has_values or (labels == 1 and not of_steps)
        self.outputs = ("logits", "score") if has_score else ("logits",)
        self.values = nn.Buffer(torch.tensor(values if self.has_values else [0.0]).float())

    def forward(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"]
    ) -> tuple[Tensor, ...]:
        """Outputs (B, C) and, where the model has one, the score (B,)."""
        logits = self._logits(input_ids, attention_mask)
        if self.has_values:
            return logits, logits.softmax(dim=-1) @ self.values
        return (logits, logits[:, 0]) if len(self.outputs) == 2 else (logits,)

    def _logits(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B C"]:
        if reads_whole(self.model):
            return self.model(input_ids=input_ids, attention_mask=attention_mask).logits.float()
        backbone = cast("Backbone", self.model.base_model)
        hidden = backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **positions_along(self.model, attention_mask),
        )[0]
        logits = F.linear(hidden.float(), score_head(self.model).weight.float())
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (attention_mask * places).argmax(dim=1)
        return logits.gather(1, last[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0]


Graph = ActorGraph | ClassifierGraph


def positions_along(
    model: PreTrainedModel, attention_mask: Int[Tensor, "B T"]
) -> dict[str, Tensor]:
    """`position_ids` counted along the mask, for models that take them."""
    backbone = model.base_model
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0)}
