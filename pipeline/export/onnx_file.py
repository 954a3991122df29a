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
from pipeline.export.onnx_graphs import ActorGraph, ClassifierGraph, Graph
from pipeline.export.source import Source
from pipeline.models.directory import TOKENIZER_FILES
from pipeline.models.load import load_causal_lm, load_classifier

GRAPH = "model.onnx"

BESIDE = 2**30
"""Bytes of weights from which they lie in a file beside the graph; 2 GiB is the format's limit."""

OF_SCORES = ("score_mean", "score_std", "class_values")
"""Of config.json, what a reader of scores needs."""


def load_graph(source: Source) -> Graph:
    """The model in fp32 on the CPU, with attention in plain operators.

    Raises:
        ModelError: it can't be loaded.
    """
    config = FrozenModelConfig(path=str(source.directory), precision="fp32")
    device = torch.device("cpu")
    if source.is_classifier:
        model = load_classifier(config, device=device)
    else:
        model = load_causal_lm(config, device=device)
    model.set_attn_implementation("eager")
    return (ClassifierGraph(model) if source.is_classifier else ActorGraph(model)).eval()


def write_onnx(graph: Graph, source: Source, directory: Path) -> None:
    """Write the graph, its weights, the tokenizer and the settings.

    Raises:
        ModelError: the model's code can't be traced.
    """
    import onnx

    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    axes = {0: batch, 1: length}
    ids = torch.ones(2, 8, dtype=torch.long)
    size = sum(weight.numel() * weight.itemsize for weight in graph.parameters())
    try:
        with quiet():
            torch.onnx.export(
                graph,
                (ids, torch.ones_like(ids)),
                directory / GRAPH,
                input_names=["input_ids", "attention_mask"],
                output_names=list(graph.outputs),
                dynamic_shapes=(axes, axes),
                dynamo=True,
                external_data=size >= BESIDE,
                verbose=False,
            )
    except (torch.onnx.OnnxExporterError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{source.directory} can't be traced to ONNX: {reason}; take --to merged"
        ) from error
    stored = onnx.load(directory / GRAPH, load_external_data=False)
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
