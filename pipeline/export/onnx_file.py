"""ONNX files, written by `torch.onnx.export`, for any batch size and sequence length.

A graph computes (input_ids, attention_mask) -> logits and, for a reward model, the score.
Dimension names: B sequences, T tokens, V vocabulary, C labels.
"""

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.config import FrozenModelConfig
from pipeline.export.source import Source, copy_settings
from pipeline.export.verify import compare_outputs
from pipeline.models.forward.forward import Backbone, is_encoder, score_head
from pipeline.models.hf.load import load_causal_lm, load_classifier
from pipeline.system.errors import ModelError, is_out_of_memory, one_line

GRAPH_FILE = "model.onnx"

MAX_INTERNAL_BYTES = 2**30
"""Size at which weights are stored in a separate file; the format's limit is 2 GiB."""

INPUTS = ("input_ids", "attention_mask")


class ActorGraph(nn.Module):
    """Computes the logits of a language model at every token.

    Positions are computed from the mask, so padding may be on either side.
    """

    outputs = ("logits",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T V"]]:
        """Return the logits, which are undefined at tokens whose mask is 0."""
        positions = positions_from_mask(self.model, attention_mask)
        result = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions
        )
        return (result.logits,)


class ClassifierGraph(nn.Module):
    """Computes the outputs of a classifier and, for a reward model, its score.

    A decoder's outputs are those at the last token whose mask is 1, regardless of its id. The
    score of several labels is the mean of config.json's `class_values`, weighted by probability.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        values = getattr(model.config, "class_values", None)
        labels = int(model.config.num_labels or 1)
        self.has_values = isinstance(values, list) and len(values) == labels > 1
        # The score of a response in steps needs the outputs at the end of each step.
        is_stepwise = getattr(model.config, "step_score", "last") != "last"
        has_score = self.has_values or (labels == 1 and not is_stepwise)
        self.outputs = ("logits", "score") if has_score else ("logits",)
        self.values = nn.Buffer(torch.tensor(values if self.has_values else [0.0]).float())

    def forward(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"]
    ) -> tuple[Tensor, ...]:
        """Return the outputs (B, C) and, if the model has one, the score (B,)."""
        logits = self._logits(input_ids, attention_mask)
        if self.has_values:
            return logits, logits.softmax(dim=-1) @ self.values
        return (logits, logits[:, 0]) if len(self.outputs) == 2 else (logits,)

    def _logits(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B C"]:
        if is_encoder(self.model):
            return self.model(input_ids=input_ids, attention_mask=attention_mask).logits.float()
        backbone = cast("Backbone", self.model.base_model)
        hidden = backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **positions_from_mask(self.model, attention_mask),
        )[0]
        logits = F.linear(hidden.float(), score_head(self.model).weight.float())
        indices = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (attention_mask * indices).argmax(dim=1)
        return logits.gather(1, last[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0]


def positions_from_mask(
    model: PreTrainedModel, attention_mask: Int[Tensor, "B T"]
) -> dict[str, Tensor]:
    """Return `position_ids` computed from the mask, for models that take them."""
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0)}


class OnnxExport:
    """A model in fp32 as an ONNX graph, with attention in plain operators."""

    def __init__(self, source: Source) -> None:
        self.source = source.directory
        config = FrozenModelConfig(path=str(source.directory), precision="fp32")
        load = load_classifier if source.is_classifier else load_causal_lm
        model = load(config, device=torch.device("cpu"))
        model.set_attn_implementation("eager")
        graph = ClassifierGraph(model) if source.is_classifier else ActorGraph(model)
        self.graph = graph.eval()
        self.title = (
            f"ONNX of a {source.kind}; {', '.join(INPUTS)} -> {', '.join(self.graph.outputs)}"
        )

    def write(self, directory: Path) -> None:
        """Write the graph, its weights, the tokenizer and the settings.

        Raises:
            ModelError: the model's code can't be traced.
        """
        size = sum(weight.numel() * weight.itemsize for weight in self.graph.parameters())
        ids = torch.ones(2, 8, dtype=torch.long)
        axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
        try:
            with _suppress_warnings():
                torch.onnx.export(
                    self.graph,
                    (ids, torch.ones_like(ids)),
                    directory / GRAPH_FILE,
                    input_names=list(INPUTS),
                    output_names=list(self.graph.outputs),
                    dynamic_shapes=(axes, axes),
                    dynamo=True,
                    external_data=size >= MAX_INTERNAL_BYTES,
                    verbose=False,
                )
        except (torch.onnx.OnnxExporterError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"{self.source} can't be exported to ONNX: {one_line(error)}; use --to merged"
            ) from error
        copy_settings(self.source, directory)

    def verify(self, directory: Path) -> list[str]:
        """Compare onnxruntime's outputs with torch's."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(
            directory / GRAPH_FILE, options, providers=["CPUExecutionProvider"]
        )

        def run(ids: Tensor, mask: Tensor) -> list[Tensor]:
            arrays = dict(zip(INPUTS, (ids.numpy(), mask.numpy()), strict=True))
            return [torch.from_numpy(np.asarray(output)) for output in session.run(None, arrays)]

        graph = self.graph
        return compare_outputs(graph.model, graph, run, program="onnxruntime", names=graph.outputs)


@contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppress the exporter's developer warnings."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
