"""Writing an ONNX file: by torch.onnx's exporter of traced programs, any batch and length."""

import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pipeline.config import FrozenModelConfig
from pipeline.errors import ModelError, is_out_of_memory
from pipeline.export.onnx_graphs import (
    INPUTS,
    ActorGraph,
    CachedActorGraph,
    ClassifierGraph,
    Graph,
    cached_layers,
)
from pipeline.export.source import Source
from pipeline.models.directory import TOKENIZER_FILES
from pipeline.models.load import load_causal_lm, load_classifier

GRAPH = "model.onnx"

BESIDE = 2**30
"""Bytes of weights from which they lie in a file beside the graph; 2 GiB is the format's limit."""

OF_SCORES = ("score_mean", "score_std", "class_values")
"""Fields of config.json that a reader of scores needs."""


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
