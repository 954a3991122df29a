"""May sequences of a model lie end to end in one row, or must they be padded?

A family whose layers are plain causal attention is packed. Whether it is one, its settings say only
in part: some layers lose the keyword that says where sequences lie, some add to the mask what they
have learned, some keep their window in the mask alone. So the code itself is asked, with a small
copy of the model: packed, it must say of each sequence what it says of that sequence alone.

The answer hangs on class and settings, not on weights: it is the same on every process, at every
ZeRO stage, for weights that are still in their files, with adapters and in every number format, and
is had without a word between processes.
"""

import functools
import logging
import math
import warnings
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.data.batches import TokenBatch
from pipeline.models.attention import RAGGED, LostLayoutError, Ragged
from pipeline.models.forward import Backbone, ragged_inputs
from pipeline.models.small_copy import VOCABULARY, small_copy, small_settings

logger = logging.getLogger(__name__)

LENGTHS = (7, 12, 5)
"""Sequences of the comparison: longer than the copy's windows, and none like its neighbour."""

TOLERANCE = 0.01
"""Nats between packed and alone. Rounding moves a copy in fp32 by 1e-6 to 1e-4; a token too many or
too few, by 0.1 and more."""


LEAK = 0.01
"""Nats by which a later token may move earlier log-probabilities: rounding, groups of experts."""


@dataclass(frozen=True)
class Run:
    """How the sequences of a model are run."""

    packed: bool
    """End to end in one row; else padded, sequences of similar length together."""

    reason: str = ""
    """Why they are padded."""

    causal: bool = True
    """Whether what is said of a token is the same whatever follows it, as it must be."""


def how_to_run(model: PreTrainedModel) -> Run:
    """Packed where that changes nothing, else padded; logged where only a try shows it.

    The model's weights are not looked at: it may be on the meta device.
    """
    reason = unlike_causal_attention(model)
    if getattr(model, "_is_stateful", False):
        return Run(packed=False, reason=str(reason))  # slow to try, and never sees what comes later
    settings = small_settings(model.config)
    settings.name_or_path = ""
    kind = _Kind(type(model), settings.to_json_string(use_diff=False), settings)
    return _tried(kind, reason)


def unlike_causal_attention(model: PreTrainedModel) -> str | None:
    """What the settings say its layers do besides causal attention; None where they say nothing."""
    settings = model.config.get_text_config()
    layers = set(getattr(settings, "layer_types", None) or ())
    others = ", ".join(sorted(layers - {"full_attention", "sliding_attention"}))
    found = {
        "its layers carry a state from token to token": getattr(model, "_is_stateful", False),
        f"it has layers of the kind {others}": others,
        "its attention is its own and takes no function from outside": not getattr(
            model, "_supports_attention_backend", False
        ),
        "its attention has linear biases (ALiBi)": getattr(settings, "alibi", False),
        "it caps its attention scores": getattr(settings, "attn_logit_softcapping", None)
        is not None,
        "its attention has sinks": any(
            name.endswith(".sinks") for name, _ in model.named_parameters()
        ),
    }
    return next((reason for reason, holds in found.items() if holds), None)


@dataclass(frozen=True)
class _Kind:
    """Models of which one answer holds for all."""

    of: type[PreTrainedModel]
    text: str
    settings: PreTrainedConfig = field(compare=False)


@functools.cache
def _tried(kind: _Kind, reason: str | None) -> Run:
    """How models of a kind are run, for which the settings may have a `reason` to pad."""
    causal = True
    is_known = reason is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = small_copy(kind.of, kind.settings)
            causal = leak(model) <= LEAK
            difference = 0.0 if is_known else difference_of_packing(model)
    except LostLayoutError as error:
        reason = f"{error}, and tokens would see those of other sequences"
    except Exception as error:  # noqa: BLE001  # whatever its code raises, padding asks less of it
        reason = reason or f"a small copy of it can't be tried ({_one_line(error)})"
    else:
        if difference > TOLERANCE:
            reason = (
                f"packed, log-probabilities of a small copy differ by {difference:.2g} nats from"
                " those of each sequence alone"
            )
    if reason is None:
        return Run(packed=True, causal=causal)
    if not is_known:
        logger.info("%s runs padded, not packed: %s", kind.settings.model_type, reason)
    return Run(packed=False, reason=reason, causal=causal)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:100]


@torch.no_grad()
def leak(model: PreTrainedModel) -> float:
    """How far the last token moves the log-probabilities before it, in nats; 0 if it is causal.

    Whichever token it is, and whether there is one: ProphetNet's code mixes up the positions that
    it is given, so that its log-probabilities hang on the length of the whole text. That is asked
    of a few tokens, within whatever window a mask is learned for.
    """
    ids, few = _tokens()[: max(LENGTHS)], _tokens()[: min(LENGTHS)]
    other = torch.cat([ids[:-1], ids[-1:] ^ 1])
    one, two, whole, short = (
        _outputs(model, {"input_ids": row[None]}) for row in (ids, other, few, few[:-1])
    )
    return max(_largest(one[:-1] - two[:-1]), _largest(whole[:-1] - short))


@torch.no_grad()
def difference_of_packing(model: PreTrainedModel) -> float:
    """Largest difference of a log-probability between packed and alone, in nats.

    The model is left with ragged attention.

    Raises:
        LostLayoutError: a layer doesn't hear where sequences lie.
    """
    ids = _tokens()
    batch = TokenBatch(ids, LENGTHS, ids[:0])
    alone = torch.cat([_outputs(model, {"input_ids": row[None]}) for row in ids.split(LENGTHS)])
    model.set_attn_implementation(RAGGED)
    packed = _outputs(model, ragged_inputs(batch, Ragged(LENGTHS, ids.device, kernels="off")))
    return _largest(packed - alone)


def _tokens() -> Int[Tensor, " N"]:
    return torch.randint(4, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def _largest(difference: Tensor) -> float:
    largest = difference.abs().max().item()
    return math.inf if math.isnan(largest) else largest


def _outputs(model: PreTrainedModel, inputs: dict[str, Any]) -> Float[Tensor, "N X"]:
    """Log-probabilities of every token in the vocabulary; of a model without, its hidden states."""
    if model.get_output_embeddings() is not None:
        return model(**inputs).logits[0].float().log_softmax(dim=-1)
    return cast("Backbone", model.base_model)(**inputs)[0][0].float()
