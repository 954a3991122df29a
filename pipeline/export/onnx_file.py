"""ONNX files by torch.onnx's exporter of traced programs, for any batch and length.

A language model computes (input_ids, attention_mask) -> logits and, with a cache, takes and gives
keys and values under the names that `optimum` has for them; a classifier computes its outputs.
Dimension names: B sequences, T tokens, P earlier ones, V vocabulary, C labels.
"""

import inspect
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from pipeline.config import FrozenModelConfig
from pipeline.errors import ModelError, is_out_of_memory
from pipeline.export.source import Source
from pipeline.models.directory import TOKENIZER_FILES
from pipeline.models.forward import Backbone, cache_name, reads_whole, score_head
from pipeline.models.load import load_causal_lm, load_classifier

GRAPH = "model.onnx"

BESIDE = 2**30
"""Bytes of weights from which they lie in a file beside the graph; 2 GiB is the format's limit."""

OF_SCORES = ("score_mean", "score_std", "class_values")
"""Fields of config.json that a reader of scores needs."""

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


def load_graph(source: Source, *, cache: bool = False) -> Graph:
    """The model in fp32 on the CPU, with attention in plain operators.

    With `cache` the graph takes and gives keys and values.

    Raises:
        ModelError: it can't be loaded, or has no keys and values of all tokens to give.
    """
    config = FrozenModelConfig(path=str(source.directory), precision="fp32")
    device = torch.device("cpu")
    load = load_classifier if source.is_classifier else load_causal_lm
    model = load(config, device=device)
    model.set_attn_implementation("eager")
    model.eval()
    if not cache:
        return (ClassifierGraph(model) if source.is_classifier else ActorGraph(model)).eval()
    if source.is_classifier:
        raise ModelError(
            f"{source.directory} is a {source.kind}, which reads a text once; take --cache none"
        )
    layers = cached_layers(model)
    if layers is None:
        raise ModelError(
            f"{source.directory}: {model.config.model_type} keeps other things of a text than keys"
            " and values of all tokens; take --cache none"
        )
    return CachedActorGraph(model, layers).eval()


def write_onnx(graph: Graph, source: Source, directory: Path) -> None:
    """Write the graph, its weights, the tokenizer and the settings.

    Raises:
        ModelError: the model's code can't be traced.
    """
    import onnx

    size = sum(weight.numel() * weight.itemsize for weight in graph.parameters())
    try:
        with quiet():
            torch.onnx.export(
                graph,
                graph.example(),
                directory / GRAPH,
                input_names=list(graph.inputs),
                output_names=list(graph.outputs),
                dynamic_shapes=graph.axes,
                dynamo=True,
                external_data=size >= BESIDE,
                verbose=False,
            )
    except (torch.onnx.OnnxExporterError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        instead = "--cache none" if isinstance(graph, CachedActorGraph) else "--to merged"
        raise ModelError(
            f"{source.directory} can't be traced to ONNX: {reason}; take {instead}"
        ) from error
    stored = onnx.load(directory / GRAPH, load_external_data=False)
    if isinstance(graph, CachedActorGraph):  # whose exporter has a symbol for a sum of lengths
        mask = next(each for each in stored.graph.input if each.name == INPUTS[1])
        mask.type.tensor_type.shape.dim[1].dim_param = "past + length"
    onnx.helper.set_model_props(stored, _properties(source))
    onnx.save(stored, directory / GRAPH)
    for pattern in ("config.json", "generation_config.json", "*.jinja", *TOKENIZER_FILES):
        for file in source.directory.glob(pattern):
            shutil.copyfile(file, directory / file.name)


def _properties(source: Source) -> dict[str, str]:
    return {
        name: json.dumps(source.settings[name]) for name in OF_SCORES if name in source.settings
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's advice to its own developers."""
    names = ("torch.onnx", "onnxscript", "onnx_ir")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
