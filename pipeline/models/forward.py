"""Running a Hugging Face model over a `TokenBatch`: per-token results, no padding in or out.

The wrappers are what the engine trains. Inside is the user's own model, unchanged.
Dimension names: N tokens, K targets, B sequences, V vocabulary, d hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.data.batches import TokenBatch
from pipeline.distributed import global_max
from pipeline.errors import DataError
from pipeline.models.attention import RAGGED, Ragged

Backbone = Callable[..., tuple[Tensor, ...]]
"""A model without its head: the first output is the hidden states, (B, T, d)."""


@dataclass(frozen=True)
class TokenLogprobs:
    """What a policy says about the target tokens of a batch."""

    logprobs: Float[Tensor, " K"]
    """log pi(token | the tokens before it), in nats, fp32."""

    entropy: Float[Tensor, " K"] | None
    """Entropy of the distribution each target was drawn from, in nats, fp32."""


class Policy(nn.Module):
    """A causal language model, asked for log-probabilities of given tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, batch: TokenBatch, *, temperature: float = 1.0, entropy: bool = False
    ) -> TokenLogprobs:
        """Log-probabilities of `batch.targets`; `temperature` divides the logits."""
        logits = self.target_logits(batch).float()
        if temperature != 1.0:
            logits = logits / temperature
        targets = batch.input_ids[batch.targets]
        logprobs = -F.cross_entropy(logits, targets, reduction="none")
        return TokenLogprobs(logprobs, categorical_entropy(logits) if entropy else None)

    def target_logits(self, batch: TokenBatch) -> Float[Tensor, "K V"]:
        """Logits that predict each target: those of the token before it."""
        require_context(base_model(self.model), batch)
        before = batch.targets - 1
        ragged = Ragged(batch.lengths, batch.input_ids.device)
        if is_ragged(self.model):
            inputs = ragged_inputs(batch, ragged)
            return self.model(**inputs, logits_to_keep=before).logits[0]
        return run_padded(batch, ragged, lambda inputs: self.model(**inputs).logits)[before]


class Scorer(nn.Module):
    """A sequence classifier with one label, asked for a score at every token.

    As a reward model its score of a response is the one at the last token; as a critic, the score
    at a token is the value of the state after it. The head runs in fp32.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TokenBatch) -> Float[Tensor, " N"]:
        """Score at every token, fp32."""
        classifier = base_model(self.model)
        require_context(classifier, batch)
        backbone = cast("Backbone", classifier.base_model)
        ragged = Ragged(batch.lengths, batch.input_ids.device)
        if is_ragged(classifier):
            hidden = backbone(**ragged_inputs(batch, ragged))[0][0]
        else:
            hidden = run_padded(batch, ragged, lambda inputs: backbone(**inputs)[0])
        head = score_head(classifier)
        return F.linear(hidden.float(), head.weight.float()).squeeze(-1)

    def final_scores(self, batch: TokenBatch) -> Float[Tensor, " B"]:
        """Score at the last real token of each sequence."""
        return self(batch)[batch.last_tokens]


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside a peft wrapper, or the model itself."""
    # Not by attribute: peft marks the model inside as well as its wrapper.
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    return cast("PreTrainedModel", plain)


def context_length(model: PreTrainedModel) -> int:
    """Tokens the model's position encoding covers; in effect no limit where it has none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def require_context(model: PreTrainedModel, batch: TokenBatch) -> None:
    """Refuse sequences that the model has no positions for.

    Raises:
        DataError: a sequence is too long.
    """
    longest, limit = max(batch.lengths), context_length(model)
    if longest > limit:
        raise DataError(
            f"a sequence has {longest} tokens and the model reads {limit}; lower data.max_length"
        )


def score_head(classifier: PreTrainedModel) -> nn.Linear:
    """The classifier's linear head, the trained copy where peft keeps one."""
    head = classifier.score
    adapters = getattr(head, "modules_to_save", None)
    return cast("nn.Linear", adapters["default"] if adapters is not None else head)


def is_ragged(model: nn.Module) -> bool:
    """Whether the model was loaded with attention that takes sequences laid end to end."""
    return base_model(model).config._attn_implementation == RAGGED  # noqa: SLF001


def ragged_inputs(batch: TokenBatch, ragged: Ragged) -> dict[str, object]:
    """Keyword arguments that run a Hugging Face model over the batch as one row."""
    return {
        "input_ids": batch.input_ids[None],
        "position_ids": ragged.positions[None],
        # transformers hands a 4-D mask through untouched: this one keeps it from building a mask of
        # N x N that ragged attention would not read.
        "attention_mask": torch.ones(1, 1, 1, 1, device=batch.input_ids.device),
        "use_cache": False,
        "ragged": ragged,
    }


def run_padded(
    batch: TokenBatch, ragged: Ragged, run: Callable[[dict[str, Tensor]], Tensor]
) -> Float[Tensor, "N X"]:
    """Run a model that knows only padded batches, a group of similar lengths at a time.

    Every process runs as many passes as the one with the most groups: they gather weights together.
    """
    outputs: list[Tensor] = []
    spare = int(global_max(len(ragged.groups))) - len(ragged.groups)
    for number, group in enumerate([*ragged.groups, *ragged.groups[:1] * spare]):
        mask = torch.zeros_like(group.tokens).flatten().index_fill(0, group.real, 1)
        inputs = {
            "input_ids": batch.input_ids[group.tokens],
            "attention_mask": mask.view_as(group.tokens),
        }
        real = group.real if number < len(ragged.groups) else group.real[:0]
        outputs.append(run(inputs).flatten(0, 1).index_select(0, real))
    return torch.cat(outputs).index_select(0, ragged.restore)


def categorical_entropy(logits: Float[Tensor, "K V"]) -> Float[Tensor, " K"]:
    """-sum p log p of the distribution softmax(logits), in nats."""
    logprobs = logits.log_softmax(dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)
