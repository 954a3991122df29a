"""What an ONNX file computes: (input_ids, attention_mask) -> logits, or a classifier's outputs.

Of a language model keys and values of earlier tokens as well, under the names that `optimum` has
for them. Dimension names: B sequences, T tokens, P earlier ones, V vocabulary, C labels.
"""

import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from pipeline.models.forward import Backbone, cache_name, reads_whole, score_head

BATCH, LENGTH, PAST = (torch.export.Dim(name) for name in ("batch", "length", "past"))
AXES = {0: BATCH, 1: LENGTH}

INPUTS = ("input_ids", "attention_mask")


class _OfTokens(nn.Module):
    """A graph of nothing but tokens and their mask."""

    inputs = INPUTS
    axes: tuple[Any, ...] = (AXES, AXES)

    def example(self) -> tuple[Any, ...]:
        """Arguments to trace it with."""
        ids = torch.ones(2, 8, dtype=torch.long)
        return ids, torch.ones_like(ids)


class ActorGraph(_OfTokens):
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


@dataclass(frozen=True)
class LayerShape:
    """What a layer keeps of a sequence: keys (heads, P, key) and values (heads, P, value)."""

    heads: int
    key: int
    value: int

    def zeros(self, batch: int, past: int) -> tuple[Tensor, Tensor]:
        """Keys and values of that many tokens."""
        widths = self.key, self.value
        keys, values = (torch.zeros(batch, self.heads, past, each) for each in widths)
        return keys, values


class CachedActorGraph(nn.Module):
    """The logits of a language model at tokens that follow those whose keys and values are given.

    The mask is that of all P + T tokens, along which positions are counted.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[LayerShape, ...]) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        kinds = [f"{number}.{kind}" for number in range(len(layers)) for kind in ("key", "value")]
        self.inputs = (*INPUTS, *(f"past_key_values.{kind}" for kind in kinds))
        self.outputs = ("logits", *(f"present.{kind}" for kind in kinds))
        earlier = [({0: BATCH, 2: PAST}, {0: BATCH, 2: PAST}) for _ in layers]
        self.axes = (AXES, {0: BATCH, 1: torch.export.Dim.DYNAMIC}, earlier)

    def example(self) -> tuple[Any, ...]:
        """Arguments to trace it with."""
        ids = torch.ones(2, 5, dtype=torch.long)
        return ids, torch.ones(2, 8, dtype=torch.long), [each.zeros(2, 3) for each in self.layers]

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Int[Tensor, "B all"],
        past: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, ...]:
        """Logits (B, T, V), then keys and values of each layer, of P + T tokens."""
        cache = DynamicCache(ddp_cache_data=past)
        positions = {
            name: every[:, -input_ids.shape[1] :]
            for name, every in positions_along(self.model, attention_mask).items()
        }
        result = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=True,
            **{cache_name(self.model): cache},
            **positions,
        )
        layers = cast("list[DynamicLayer]", cache.layers)
        kept = [cast("Tensor", each) for layer in layers for each in (layer.keys, layer.values)]
        return (result.logits, *kept)


@torch.no_grad()
def cached_layers(model: PreTrainedModel) -> tuple[LayerShape, ...] | None:
    """What each layer keeps of a sequence; None unless that is keys and values of all tokens."""
    cache = DynamicCache()
    try:
        ids = torch.ones(1, 2, dtype=torch.long)
        name = cache_name(model)
        kept = model(input_ids=ids, use_cache=True, **{name: cache})[name]
    except (AttributeError, IndexError, TypeError, ValueError):  # a family with a memory of its own
        return None
    if kept is not cache or not cache.layers:
        return None
    found: list[LayerShape] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if type(layer) is not DynamicLayer or keys is None or values is None:
            return None
        if keys.shape[:3] != values.shape[:3] or keys.shape[2] != ids.shape[1]:
            return None
        found.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
    return tuple(found)


class ClassifierGraph(_OfTokens):
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


Graph = ActorGraph | CachedActorGraph | ClassifierGraph


def positions_along(
    model: PreTrainedModel, attention_mask: Int[Tensor, "B T"]
) -> dict[str, Tensor]:
    """`position_ids` counted along the mask, for models that take them."""
    backbone = model.base_model
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0)}
