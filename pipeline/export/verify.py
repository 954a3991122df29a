"""Verify an export by comparing its outputs with the model's."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.config import FrozenModelConfig
from pipeline.demo.task import corpus
from pipeline.models.forward.packing import detect_batching
from pipeline.models.hf.load import load_tokenizer
from pipeline.system.errors import ModelError

TOLERANCE = 1e-5
"""Maximum difference of fp32 outputs, relative to the batch's largest output, or 1 if larger."""

ROUNDED = 5e-2
"""The same for a model whose weights were rounded to 8 or 16 bits."""

LENGTHS = ((5,), (12, 12), (1, 7, 4), (33, 2, 9, 13))
"""Sequence lengths of each batch, in tokens."""

Runner = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""Function of token ids (B, T) and their mask (B, T) that returns logits, then other outputs."""


class UnverifiedError(ModelError):
    """The written files differ from the model and were removed."""


def logits_fn(model: torch.nn.Module) -> Runner:
    """Return a function that computes the logits of a `transformers` or peft model."""
    return lambda ids, mask: [model(input_ids=ids, attention_mask=mask).logits.float()]


@torch.no_grad()
def compare_outputs(
    model: PreTrainedModel,
    expected: Runner,
    actual: Runner,
    *,
    program: str,
    names: Sequence[str] = ("logits",),
    tolerance: float = TOLERANCE,
) -> list[str]:
    """Compare outputs of a model and of its export, which `program` computes, on padded batches.

    `tolerance` is relative to the largest output of a batch, or to 1 if that is larger. Return
    sentences that state what was verified.

    Raises:
        UnverifiedError: an output differs by more than the tolerance.
    """
    per_token = hasattr(model, "generate") and model.get_output_embeddings() is not None
    max_error, count = 0.0, 0
    for ids, mask in batches(model):
        valid = mask.bool() if per_token else slice(None)
        outputs = zip(names, expected(ids, mask), actual(ids, mask), strict=True)
        for name, reference, exported in outputs:
            scale = max(1.0, float(reference[valid].abs().max()))
            error = float((reference[valid] - exported[valid]).abs().max()) / scale
            if not error <= tolerance:
                raise UnverifiedError(
                    f"not exported: the {name} computed by {program} and by the model differ by"
                    f" {error:.1e} relative to {scale:.3g}; the limit is {tolerance}"
                )
            max_error = max(max_error, error)
        count += 1
    return [
        f"{' and '.join(names)} computed by {program} are within {tolerance} of the model's on"
        f" {count} padded batches (largest difference {max_error:.1e})"
    ]


def batches(model: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (ids, mask) batches (B, T) of English text; causal models also get left padding."""
    tokenizer = load_tokenizer(FrozenModelConfig(path=model.config.name_or_path))
    text = iter(tokenizer.encode(" ".join(corpus()[::40]), add_special_tokens=False))
    sides = ("right", "left") if detect_batching(model).causal else ("right",)
    for lengths in LENGTHS:
        for side in sides:
            shape = len(lengths), max(lengths)
            mask = torch.zeros(shape, dtype=torch.long)
            for row, length in zip(mask, lengths, strict=True):
                row[:length] = 1
            mask = mask if side == "right" else torch.fliplr(mask)
            yield torch.tensor(list(islice(text, mask.numel()))).view(shape), mask
