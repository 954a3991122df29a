"""Runs a Hugging Face model over a `TokenBatch`, with per-token results and without padding.

`Policy` and `Scorer` wrap the user's unchanged model for the engine. Dimension names: N tokens, K
targets, B sequences of T tokens, V vocabulary, C labels, R rows, d hidden size.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.config import Kernels
from pipeline.data.batches import TokenBatch
from pipeline.engine.sharding.units import UsesHead
from pipeline.kernels.logprobs import (
    MAX_UNTILED,
    compute_logprobs,
    linear_logprobs,
    output_layer,
    row_logprobs,
)
from pipeline.models.forward.attention import KEY_BLOCK, RAGGED, Ragged, unpad
from pipeline.models.forward.scores import expected_value, response_scores
from pipeline.models.forward.vocab_parallel import FP32_LOGITS, get_vocab_shard, head_input
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import DataError, KernelError, ModelError

logger = logging.getLogger(__name__)

SCORE_HEAD = "score"
"""Name of the attribute with a causal classifier's head; encoders use other names."""

Backbone = Callable[..., tuple[Tensor, ...]]
"""A model without its head: the first output is the hidden states, (B, T, d)."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Output of a policy for the target tokens of a batch."""

    logprobs: Float[Tensor, " K"]
    """log pi(token | the tokens before it), in nats, fp32."""

    entropy: Float[Tensor, " K"] | None
    """Entropy of each target's distribution, in nats, fp32; None unless requested."""


class Policy(nn.Module):
    """A causal language model that returns the log-probabilities of given tokens.

    If the logits would need much memory, they are never computed for all targets at once, provided
    that the model's output is one matrix product and `kernels` is not off.
    """

    def __init__(
        self, model: nn.Module, *, kernels: Kernels = "auto", tile: int | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.uses_head = UsesHead()
        self.kernels: Kernels = kernels
        self.tile = tile
        """Maximum number of logits per tile; None uses the kernels' default."""
        self._has_linear_logits: bool | None = None

    def forward(
        self,
        batch: TokenBatch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        entropy_grad: bool = True,
        uniform: bool = False,
        fn: Callable[..., tuple[Tensor, ...]] | None = None,
    ) -> TokenLogprobs | tuple[Tensor, ...]:
        """Return the log-probabilities of `batch.targets`; `temperature` divides the logits.

        Set `entropy_grad` if the loss includes the requested entropy, and `uniform` if it weights
        all log-probabilities equally, which is faster. With `fn`, the result is `fn(hidden states,
        weight, bias)` if logits can be computed in tiles and are unsharded, else `fn(logits)`.
        """
        require_context(base_model(self.model), batch)
        targets = batch.input_ids[batch.targets]
        head = self._output_matrix(batch)
        vocab_shard = get_vocab_shard(head)
        if fn is not None:
            if head is None or vocab_shard is not None:
                return fn(self._logits(batch))
            return self.uses_head(fn, self._hidden(batch), head.weight, head.bias)
        is_large_batch = head is not None and len(targets) * head.out_features > (
            self.tile or MAX_UNTILED
        )
        computed: tuple[Tensor, Tensor | None]
        if head is not None and (vocab_shard is not None or is_large_batch):
            computed = self.uses_head(
                linear_logprobs,
                self._hidden(batch),
                head.weight,
                head.bias,
                targets,
                temperature=temperature,
                entropy=entropy,
                entropy_grad=entropy_grad,
                uniform=uniform,
                tile=self.tile,
                vocab_shard=vocab_shard,
            )
        elif self.kernels == "off" or (entropy and entropy_grad and torch.is_grad_enabled()):
            computed = compute_logprobs(
                self._logits(batch),
                targets,
                temperature=temperature,
                entropy=entropy,
                entropy_grad=entropy_grad,
            )
        else:
            computed = row_logprobs(
                self._logits(batch),
                targets,
                temperature=temperature,
                entropy=entropy,
                chunk_size=self.tile,
            )
        return TokenLogprobs(*computed)

    def detect_linear_logits(self, batch: TokenBatch) -> None:
        """Determine once, on a few tokens of a batch, whether logits are one matrix product."""
        self._output_matrix(batch)

    def logits(self, batch: TokenBatch) -> Float[Tensor, "K V"]:
        """Return the logits that predict `batch.targets`, all in memory at once."""
        require_context(base_model(self.model), batch)
        return self._logits(batch)

    def _output_matrix(self, batch: TokenBatch) -> nn.Linear | None:
        """Return the output layer, or None if log-probabilities can't be computed from it in tiles.

        Every process runs the same forward passes and gets the same result.
        """
        head = base_model(self.model).get_output_embeddings()
        # Exactly nn.Linear: peft's layers compute more than the product.
        is_large = type(head) is nn.Linear and head.out_features >= LARGE_VOCABULARY
        if get_vocab_shard(head) is None and (self.kernels == "off" or not is_large):
            return None
        if self._has_linear_logits is None:
            self._has_linear_logits = has_linear_logits(self.model, batch)
            if not self._has_linear_logits:
                _report_full_logits(type(base_model(self.model)).__name__, self.kernels)
        return head if self._has_linear_logits and isinstance(head, nn.Linear) else None

    def _hidden(self, batch: TokenBatch) -> Float[Tensor, "K d"]:
        """Return the input of the output layer for each target, in fp32 for fp32 logits."""
        backbone = cast("Backbone", base_model(self.model).base_model)
        ragged, before = ragged_layout(batch, self.kernels), batch.before_targets
        if is_ragged(self.model):
            hidden = backbone(**ragged_inputs(batch, ragged))[0][0][before]
        else:
            hidden = run_padded(batch, ragged, lambda inputs: backbone(**inputs)[0])[before]
        return head_input(base_model(self.model).get_output_embeddings(), hidden)

    def _logits(self, batch: TokenBatch) -> Float[Tensor, "K V"]:
        """Return the model's logits for each target: the output at the preceding token."""
        ragged, before = ragged_layout(batch, self.kernels), batch.before_targets
        if is_ragged(self.model):
            inputs = ragged_inputs(batch, ragged)
            return self.model(**inputs, logits_to_keep=before).logits[0]
        return run_padded(batch, ragged, lambda inputs: self.model(**inputs).logits)[before]


def set_fp32_logits(model: nn.Module) -> None:
    """Make the output layer of an unsharded model return fp32 logits; see `output_layer`.

    Raises:
        ModelError: the layer is not plain, for example because it has an adapter.
    """
    head = base_model(model).get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(
            "fp32_head needs a linear output layer without an adapter, but this model's is a"
            f" {type(head).__name__}; set fp32_head to false"
        )
    setattr(head, FP32_LOGITS, True)
    object.__setattr__(
        head, "forward", lambda x: output_layer(head_input(head, x), head.weight, head.bias)
    )


class Scorer(nn.Module):
    """A sequence classifier that returns a score at every token.

    In a reward model, a response's score is the score of its last token; in a critic, the score of
    a token is the value of the state after it. With several labels the score is their expected
    value. The head computes in fp32; its weight and input have the model's data type, and training
    keeps an fp32 master weight. An encoder such as BERT has the same score at all tokens.
    """

    def __init__(self, model: nn.Module, *, kernels: Kernels = "auto") -> None:
        super().__init__()
        self.model = model
        self.kernels: Kernels = kernels

    def forward(
        self, batch: TokenBatch, *, labels: bool = False
    ) -> Float[Tensor, " N"] | Float[Tensor, "N C"]:
        """Return the scores at every token, in fp32, or with `labels` the outputs of all labels.

        Raises:
            ModelError: a score is required, but the model's labels have no values.
        """
        classifier = base_model(self.model)
        require_context(classifier, batch)
        logits = self._logits(classifier, batch)
        return logits if labels else expected_value(logits, classifier)

    def final_scores(self, batch: TokenBatch) -> Float[Tensor, " R"]:
        """Return each row's score: at its last token, or from the steps of its response."""
        return response_scores(self(batch), batch, base_model(self.model).config)

    def _logits(self, classifier: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "N C"]:
        backbone = cast("Backbone", classifier.base_model)
        ragged = ragged_layout(batch, self.kernels)
        if is_encoder(classifier):
            return run_padded(batch, ragged, lambda inputs: pooled_logits(classifier, inputs))
        if is_ragged(classifier):
            hidden = backbone(**ragged_inputs(batch, ragged))[0][0]
        else:
            hidden = run_padded(batch, ragged, lambda inputs: backbone(**inputs)[0])
        return F.linear(hidden.float(), score_head(classifier).weight.float())


def pooled_logits(classifier: PreTrainedModel, inputs: dict[str, Tensor]) -> Float[Tensor, "B T C"]:
    """Return the outputs of an encoder, repeated for each token of a sequence."""
    logits: Tensor = classifier(**inputs).logits.float()
    return logits[:, None].expand(-1, inputs["input_ids"].shape[1], -1)


def is_encoder(classifier: PreTrainedModel) -> bool:
    """Return whether a classifier is an encoder, which attends in both directions."""
    return not hasattr(classifier, SCORE_HEAD)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the Hugging Face model inside a peft wrapper, or the model itself."""
    # Not by attribute: peft sets its attributes on the inner model too.
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    return cast("PreTrainedModel", plain)


LARGE_VOCABULARY = 8192
"""Vocabulary size below which a token's logits take no more memory than its activations."""

NUM_PROBE_TOKENS = 8
"""Number of tokens on which a model's logits are compared with the matrix product."""


@torch.no_grad()
def has_linear_logits(model: nn.Module, batch: TokenBatch) -> bool:
    """Return whether logits are exactly the output layer applied to the last hidden states.

    Some families scale, cap or shift them, or the hidden states. The model itself is run on a few
    tokens of the batch, so that the answer is also correct for unknown families.
    """
    plain = base_model(model)
    head = cast("nn.Linear", plain.get_output_embeddings())
    backbone = cast("Backbone", plain.base_model)
    if backbone is plain:  # the model doesn't name its backbone
        return False
    count = min(NUM_PROBE_TOKENS, batch.lengths[0])
    ids = batch.input_ids[:count]
    probe = TokenBatch(ids, (count,), batch.targets[:0])
    training = model.training
    model.eval()  # dropout would differ between passes and advance the generator
    try:
        if is_ragged(model):
            inputs = ragged_inputs(probe, Ragged(probe.lengths, ids.device))
        else:
            padding = (0, -count % KEY_BLOCK)  # padded lengths are multiples of it
            inputs = {
                "input_ids": F.pad(ids, padding)[None],
                "attention_mask": F.pad(torch.ones_like(ids), padding)[None],
            }
        hidden = backbone(**inputs)[0]
        logits: Tensor = model(**inputs).logits
    finally:
        model.train(training)
    return torch.equal(logits, head(hidden))


def _report_full_logits(family: str, kernels: Kernels) -> None:
    """Log that full logits are computed, or raise if they must not be."""
    reason = f"the logits of {family} are not the output layer applied to the last hidden states"
    if kernels == "required":
        raise KernelError(
            f"kernels is set to required, but {reason}, so they can't be computed in tiles; set"
            " kernels to auto"
        )
    logger.info("%s: all logits of a micro-batch are computed at once", reason)


POSITIONS_AFTER_PADDING = (
    *("camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta"),
    *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Types of models that number positions from `pad_token_id + 1` instead of 0, as RoBERTa does."""


def context_length(model: PreTrainedModel) -> int:
    """Return the maximum length of the model's position encoding, or 2^31 if it has no limit."""
    return max_positions(model.config)


def max_positions(settings: PreTrainedConfig) -> int:
    """Return the `context_length` of a model with these settings."""
    settings = settings.get_text_config()
    length = getattr(settings, "max_position_embeddings", None) or 2**31
    is_offset = settings.model_type in POSITIONS_AFTER_PADDING
    return length - cast("int", settings.pad_token_id) - 1 if is_offset else length


def require_context(model: PreTrainedModel, batch: TokenBatch) -> None:
    """Reject sequences longer than the model's position encoding.

    Raises:
        DataError: a sequence is too long.
    """
    longest, limit = batch.longest, context_length(model)
    if longest > limit:
        raise DataError(
            f"a sequence has {longest} tokens, but the model's context is {limit}; lower"
            " data.max_length"
        )


def score_head(classifier: PreTrainedModel) -> nn.Linear:
    """Return the classifier's linear head, or peft's trained copy of it."""
    head = classifier.score
    trained_copies = getattr(head, "modules_to_save", None)
    return cast("nn.Linear", trained_copies["default"] if trained_copies is not None else head)


def is_ragged(model: nn.Module) -> bool:
    """Return whether the model was loaded with attention for packed sequences."""
    return base_model(model).config._attn_implementation == RAGGED  # noqa: SLF001


def ragged_layout(batch: TokenBatch, kernels: Kernels) -> Ragged:
    """Return the layout of the batch's sequences in one row."""
    device = batch.input_ids.device
    return Ragged(batch.lengths, device, kernels=kernels, continues=batch.continues)


def ragged_inputs(batch: TokenBatch, ragged: Ragged) -> dict[str, object]:
    """Return keyword arguments for running a Hugging Face model over the batch as one row."""
    return {
        "input_ids": batch.input_ids[None],
        "position_ids": ragged.positions[None],
        # transformers passes a 4-D mask through unchanged. This one keeps it from building an N x N
        # mask that ragged attention would not read.
        "attention_mask": torch.ones(1, 1, 1, 1, device=batch.input_ids.device),
        "use_cache": False,
        "ragged": ragged,
    }


def run_padded(
    batch: TokenBatch, ragged: Ragged, run: Callable[[dict[str, Tensor]], Tensor]
) -> Float[Tensor, "N X"]:
    """Run a model that requires padded batches, one group of similar lengths at a time.

    Every process runs as many passes as the process with the most groups, because passes gather
    weights collectively.
    """
    padded = ragged.padded
    groups = [
        {"input_ids": ids, "attention_mask": mask}
        for ids, mask in zip(
            padded.split(batch.input_ids[padded.source]), padded.split(padded.real), strict=True
        )
    ]
    outputs = [run(group).flatten(0, 1) for group in groups]
    num_spare = int(current_mesh().data.max(len(groups))) - len(groups)
    outputs += [run(groups[0]).flatten(0, 1)[:0] for _ in range(num_spare)]
    return unpad(torch.cat(outputs), padded.index)


def cache_name(model: nn.Module) -> Literal["cache", "past_key_values"]:
    """Return the name of the cache as an argument, and in the output, of a model's forward pass.

    Before transformers 5.24 it was past_key_values in all families.
    """
    names = inspect.signature(base_model(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"
