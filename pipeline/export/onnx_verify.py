"""Does onnxruntime compute with an ONNX file what torch computes with the model?"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.export.greedy import greedy_tokens
from pipeline.export.onnx_file import ActorGraph, CachedActorGraph, Graph
from pipeline.export.source import UnverifiedError
from pipeline.models.packing import how_to_run

TOLERANCE = 1e-5
"""Largest difference of an output, in units of the largest output of the batch, or of 1."""

LENGTHS = ((5,), (12, 12), (1, 7, 4), (13, 2, 9, 13))
"""Tokens of the sequences of each batch."""

NEW_TOKENS = 16


class Runtime:
    """A session of onnxruntime on the CPU, with the graph that its file was made of."""

    def __init__(self, graph: Graph, file: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self.graph = graph
        self.session = onnxruntime.InferenceSession(
            file, options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, ids: Tensor, mask: Tensor, past: Sequence[Tensor] = ()) -> list[Tensor]:
        """The outputs for ids (B, T), mask (B, P + T) and keys and values of P tokens, if any."""
        if isinstance(self.graph, CachedActorGraph) and not past:
            past = [each for layer in self.graph.layers for each in layer.zeros(len(ids), 0)]
        arrays = [each.numpy() for each in (ids, mask, *past)]
        found = self.session.run(None, dict(zip(self.graph.inputs, arrays, strict=True)))
        return [torch.from_numpy(np.asarray(each)) for each in found]

    def whole(self, ids: Tensor, mask: Tensor) -> list[Tensor]:
        """The outputs for all tokens; with a cache the second half of them in a pass of its own."""
        half = (ids.shape[1] + 1) // 2
        if not isinstance(self.graph, CachedActorGraph) or half == ids.shape[1]:
            return self(ids, mask)
        first, *past = self(ids[:, :half], mask[:, :half])
        second, *past = self(ids[:, half:], mask, past)
        return [torch.cat([first, second], dim=1), *past]

    def greedy(self, ids: Tensor, mask: Tensor, count: int) -> Tensor:
        """The likeliest tokens (B, count) after prompts that are padded left, one by one."""
        added, past, found = ids, [], []
        for _ in range(count):
            logits, *past = self(added, mask, past)
            following = logits[:, -1].argmax(dim=-1, keepdim=True)
            found.append(following)
            mask = torch.cat([mask, torch.ones_like(following)], dim=1)
            is_cached = isinstance(self.graph, CachedActorGraph)
            added = following if is_cached else torch.cat([added, following], dim=1)
        return torch.cat(found, dim=1)


@torch.no_grad()
def verify_onnx(graph: Graph, file: Path) -> list[str]:
    """What was verified, in sentences.

    Raises:
        UnverifiedError: an output differs by more than `TOLERANCE`, or a greedy response at all.
    """
    runtime = Runtime(graph, file)
    worst, count = 0.0, 0
    is_cached = isinstance(graph, CachedActorGraph)
    is_actor = is_cached or isinstance(graph, ActorGraph)
    plain = ActorGraph(graph.model) if is_cached else graph
    names = plain.outputs
    for ids, mask in batches(graph.model):
        results = plain(ids, mask)
        expected = [results] if isinstance(results, Tensor) else list(results)
        found = runtime.whole(ids, mask)[: len(names)]
        for name, ours, theirs in zip(names, expected, found, strict=True):
            kept = mask.bool() if is_actor else slice(None)
            scale = max(1.0, float(ours[kept].abs().max()))
            error = float((ours[kept] - theirs[kept]).abs().max()) / scale
            if not error <= TOLERANCE:
                raise UnverifiedError(
                    f"not exported: {name} by onnxruntime differ by {error:.1e} of"
                    f" {scale:.3g} from torch's, more than {TOLERANCE}"
                )
            worst = max(worst, error)
        count += 1
    how = " in two passes, the second by keys and values of the first," if is_cached else ""
    verified = [
        f"{' and '.join(names)} by onnxruntime{how} within {TOLERANCE} of torch's on {count}"
        f" batches, padded left and right among them (largest difference {worst:.1e})"
    ]
    if is_actor:
        verified.append(_greedy(graph.model, runtime))
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


def _greedy(model: PreTrainedModel, runtime: Runtime) -> str:
    """Greedy responses to a padded batch against those of transformers, alone."""
    ids, mask = list(batches(model))[-1]
    prompts = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
    for prompt, found in zip(prompts, runtime.greedy(ids, mask, NEW_TOKENS), strict=True):
        if greedy_tokens(model, prompt, NEW_TOKENS) != found.tolist():
            raise UnverifiedError(
                "not exported: a greedy response by onnxruntime is another one than that of"
                " transformers"
            )
    return (
        f"{len(prompts)} greedy responses of {NEW_TOKENS} tokens by onnxruntime, in a padded batch,"
        " equal those of transformers, each alone"
    )
