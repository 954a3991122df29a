"""Does onnxruntime compute with an ONNX file what torch computes with the model?"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.export.aside import UnverifiedError
from pipeline.export.greedy import greedy_tokens
from pipeline.export.onnx_graphs import ActorGraph, Graph
from pipeline.models.packing import how_to_run

TOLERANCE = 1e-5
"""Largest difference of an output, in units of the largest output of the batch, or of 1."""

LENGTHS = ((5,), (12, 12), (1, 7, 4), (13, 2, 9, 13))
"""Tokens of the sequences of each batch."""

NEW_TOKENS = 16


class Runtime:
    """A session of onnxruntime on the CPU."""

    def __init__(self, file: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            file, options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, ids: Tensor, mask: Tensor) -> list[Tensor]:
        """The outputs for ids (B, T) and mask (B, T)."""
        inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        return [torch.from_numpy(np.asarray(each)) for each in self.session.run(None, inputs)]


@torch.no_grad()
def verify_onnx(graph: Graph, file: Path) -> list[str]:
    """What was verified, in sentences.

    Raises:
        UnverifiedError: an output differs by more than `TOLERANCE`, or a greedy response at all.
    """
    runtime = Runtime(file)
    worst, count = 0.0, 0
    for ids, mask in batches(graph.model):
        results = graph(ids, mask)
        expected = [results] if isinstance(results, Tensor) else list(results)
        for name, ours, theirs in zip(graph.outputs, expected, runtime(ids, mask), strict=True):
            kept = mask.bool() if isinstance(graph, ActorGraph) else slice(None)
            scale = max(1.0, float(ours[kept].abs().max()))
            error = float((ours[kept] - theirs[kept]).abs().max()) / scale
            if not error <= TOLERANCE:
                raise UnverifiedError(
                    f"not exported: {name} by onnxruntime differ by {error:.1e} of"
                    f" {scale:.3g} from torch's, more than {TOLERANCE}"
                )
            worst = max(worst, error)
        count += 1
    names = " and ".join(graph.outputs)
    verified = [
        f"{names} by onnxruntime within {TOLERANCE} of torch's on {count} batches, padded left and"
        f" right among them (largest difference {worst:.1e})"
    ]
    if isinstance(graph, ActorGraph):
        verified.append(_greedy(graph, runtime))
    return verified


def batches(model: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, mask), each (B, T), of random tokens, padded right and, of causal models, left."""
    draw = torch.Generator().manual_seed(0)
    rows = model.config.get_text_config().vocab_size
    sides = ("right", "left") if how_to_run(model).causal else ("right",)
    for lengths in LENGTHS:
        for side in sides:
            shape = len(lengths), max(lengths)
            mask = torch.zeros(shape, dtype=torch.long)
            for row, length in zip(mask, lengths, strict=True):
                row[:length] = 1
            mask = mask if side == "right" else torch.fliplr(mask)
            yield torch.randint(rows, shape, generator=draw), mask


def _greedy(graph: ActorGraph, runtime: Runtime) -> str:
    """Greedy responses to a padded batch, by whole passes, against those of transformers, alone."""
    model = graph.model
    ids, mask = list(batches(model))[-1]
    prompts = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
    for _ in range(NEW_TOKENS):
        logits = runtime(ids, mask)[0]
        following = logits[:, -1].argmax(dim=-1, keepdim=True)
        ids = torch.cat([ids, following], dim=1)
        mask = torch.cat([mask, torch.ones_like(following)], dim=1)
    for prompt, found in zip(prompts, ids[:, -NEW_TOKENS:], strict=True):
        if greedy_tokens(model, prompt, NEW_TOKENS) != found.tolist():
            raise UnverifiedError(
                "not exported: a greedy response by onnxruntime is another one than that of"
                " transformers"
            )
    return (
        f"{len(prompts)} greedy responses of {NEW_TOKENS} tokens by onnxruntime, in a padded batch,"
        " equal those of transformers, each alone"
    )
