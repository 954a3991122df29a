"""Export a step's model, and compare it with the trained model in plain `transformers`."""

import logging
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
)

from pipeline.data.batches import TokenBatch, collate, pad
from pipeline.data.examples import Encoded
from pipeline.files.safetensors_header import stored_tensors
from pipeline.models.adapters.quantized import quantized_layers
from pipeline.models.forward.forward import base_model
from pipeline.models.hf.directory import is_sequence_classifier
from pipeline.models.hf.export import export
from pipeline.models.hf.load import suppress_transformers_warnings
from pipeline.models.passes import Passes, evaluating
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import ModelError, is_out_of_memory, one_line
from pipeline.system.memory import available_bytes

logger = logging.getLogger(__name__)

TEXTS = ("The capital of France is Paris, and 12 + 7 is 19.", "Thank you.")

TOLERANCE = 1e-5
"""Maximum mean difference of fp32 outputs, relative to max(1, the largest output)."""

LOGPROBS, SCORES = "log-probabilities", "scores"

ROUNDED = {LOGPROBS: 2e-2, SCORES: 0.1}
"""Tolerances by kind of output, for 16-bit or quantized weights, or for outputs of a GPU."""


def export_verified(
    passes: Passes, model: nn.Module, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Export `model`, which the engine of `passes` trains, and compare outputs on two short texts.

    All processes must call this. The main process loads the directory with plain `transformers` on
    the CPU, unless the host has too little memory.

    Raises:
        ModelError: the directory can't be loaded, or its outputs differ from the trained model's.
    """
    export(model, tokenizer, directory, weights=passes.engine)
    base, world = base_model(model), current_mesh().world
    kind = SCORES if is_sequence_classifier([type(base).__name__]) else LOGPROBS
    rows = [
        [*tokenizer.encode(text, add_special_tokens=False), cast("int", tokenizer.eos_token_id)]
        for text in TEXTS
    ]
    batch = collate([Encoded(row, [True] * len(row)) for row in rows])
    labels = int(base.config.num_labels or 1) if kind == SCORES else 0
    expected = _trained_outputs(passes, batch.to(local_device()), labels=labels)
    is_rounded = next(model.parameters()).dtype != torch.float32 or bool(quantized_layers(model))
    tolerance = ROUNDED[kind] if is_rounded or expected.device.type != "cpu" else TOLERANCE
    problem = ""
    if world.rank == 0:
        trusted = type(base).__module__.startswith("transformers_modules")
        problem = _find_problem(directory, batch, expected.cpu(), kind, tolerance, trusted=trusted)
    if problem := world.gather_objects(problem)[0]:
        raise ModelError(
            f"{directory} {problem}; this is a bug in the export; please report it. The step's"
            " checkpoints are complete: a fixed version can export them with --resume"
        )


def _trained_outputs(passes: Passes, batch: TokenBatch, *, labels: int) -> Tensor:
    """Return log-probabilities (targets,) or class logits (texts, labels); all must call this."""
    engine = passes.engine
    is_policy = labels == 0

    def compute(inputs: TokenBatch) -> Tensor:
        if is_policy:
            return engine(inputs).logprobs
        return engine(inputs, labels=True)[inputs.last_tokens]

    shape = (batch.num_targets,) if is_policy else (len(batch.lengths), labels)
    with evaluating(engine.model):
        return passes.forward_everywhere([batch], compute, lambda _: shape)[0]


def _find_problem(
    directory: Path, batch: TokenBatch, expected: Tensor, kind: str, tol: float, *, trusted: bool
) -> str:
    """Describe how the exported model fails to load or differs from `expected`, or return ""."""
    start = time.perf_counter()
    files = {stored.file for stored in stored_tensors(directory).values()}
    actual: Tensor | None = None
    try:
        if sum(file.stat().st_size for file in files) <= available_bytes():
            actual = _exported_outputs(directory, batch, kind, trusted=trusted)
    except Exception as error:  # noqa: BLE001  # transformers may raise anything
        if not is_out_of_memory(error):  # otherwise the whole step would be retried
            return f"can't be loaded by transformers ({one_line(error)})"
    if actual is None:
        logger.info("%s was not compared with the trained model: not enough memory", directory)
        return ""
    scale = max(1.0, float(expected.abs().max()))
    error = float((expected - actual).abs().mean()) / scale
    if not error <= tol:
        return (
            f"gives different {kind} in transformers than the trained model (mean difference"
            f" {error:.1e} relative to {scale:.3g}, more than {tol})"
        )
    seconds = time.perf_counter() - start
    logger.info("checked: %s gives the same outputs in transformers (%.1f s)", directory, seconds)
    return ""


@torch.no_grad()
def _exported_outputs(directory: Path, batch: TokenBatch, kind: str, *, trusted: bool) -> Tensor:
    """Compute the outputs of the directory's model for the padded texts, like `_trained_outputs`.

    With `trusted`, the trained model has custom Python code, which the user trusts.
    """
    auto: Any = AutoModelForSequenceClassification if kind == SCORES else AutoModelForCausalLM
    with suppress_transformers_warnings():
        model = auto.from_pretrained(directory, trust_remote_code=trusted).eval()
    ids, mask = pad(batch.input_ids.split(batch.lengths))
    padding = model.config.get_text_config().pad_token_id
    ids = ids if padding is None else ids.masked_fill(~mask, padding)
    logits = model(input_ids=ids, attention_mask=mask.long()).logits.float()
    if kind == SCORES:
        return logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return logprobs[mask[:, 1:]]
