"""Token sampling with counter-based random numbers and inverse-transform sampling.

Dimension names: B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt64
from torch import Tensor

from inference.settings import Sampling
from pipeline.kernels import sampling
from pipeline.kernels.sampling import MIN_TEMPERATURE, Draw

BLOCK = 128
"""Tokens per block, about the square root of a vocabulary's size; only one block is searched."""

MAX_UNBLOCKED = 4096
"""Vocabulary size up to which one cumulative sum is faster than a search by blocks."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 (Steele et al. 2014), a bijection of 64-bit words."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def uniform_numbers(
    seed: int, keys: Sequence[int], positions: int | Sequence[int]
) -> Float[np.ndarray, " B"]:
    """Return a uniform random number in [0, 1) for each key and position, a hash of both and seed.

    No generator state is kept, so a row's numbers do not depend on the other rows.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        state = _mixed_seed(seed)
        state = _mix((state ^ np.asarray(keys, dtype=np.uint64)) + _GOLDEN)
        state = _mix((state ^ np.asarray(positions, dtype=np.uint64)) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed_seed(seed: int) -> np.ndarray:
    return _mix(np.asarray([seed % 2**64], dtype=np.uint64) + _GOLDEN)


def as_words(
    keys: Sequence[int], positions: int | Sequence[int]
) -> tuple[UInt64[np.ndarray, " B"], UInt64[np.ndarray, " B"]]:
    """Return keys and positions as 64-bit words, broadcast to a common length."""
    words = np.asarray(keys, np.uint64)
    return words, np.broadcast_to(np.asarray(positions, np.uint64), len(words))


@dataclass(frozen=True, kw_only=True)
class Sampler(Draw):
    """Chooses the next token; see `inference/settings.py` for the settings."""

    repetition_penalty: float = 1.0

    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the response already contains."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each occurrence in the response."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and the number added to its logit."""

    min_new_tokens: int = 0
    stop_ids: Sequence[int] = ()
    """Tokens that end a response; forbidden until it has `min_new_tokens` tokens."""

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on the preceding tokens."""
        return self.repetition_penalty != 1.0

    @property
    def counts_tokens(self) -> bool:
        """Whether the choice depends on which tokens the response contains."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def forbids_early_stop(self) -> bool:
        """Whether some tokens are forbidden at the start of a response."""
        return self.min_new_tokens > 0 and len(self.stop_ids) > 0

    @property
    def truncates(self) -> bool:
        """Whether the distribution is truncated."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def logits_change_reason(self) -> str | None:
        """Reason why logits are modified before sampling, as a clause; None if they aren't."""
        if self.needs_history:
            return "a repetition penalty changes the logits"
        if self.counts_tokens or self.logit_bias:
            return "a penalty or a bias changes the logits"
        return "a minimum length changes the logits" if self.forbids_early_stop else None

    def __call__(
        self,
        logits: Float[Tensor, "B V"],
        keys: Sequence[int],
        positions: int | Sequence[int],
        histories: Sequence[Sequence[int]] = (),
        responses: Sequence[Sequence[int]] = (),
    ) -> tuple[list[int], list[float]]:
        """Return tokens, and their log-probabilities under the full policy at this temperature.

        Args:
            logits: logits of the next token of each sequence.
            keys: number of each sequence; with the seed and position, it determines the sample.
            positions: number of tokens in each response so far.
            histories: all tokens of each sequence, if `needs_history`.
            responses: the sampled tokens of each sequence, if `counts_tokens`.

        Raises:
            KernelError: kernels are required, but none supports these logits.
        """
        if sampling.find_kernel(logits, self.logits_change_reason) is not None and len(logits):
            numbers = torch.from_numpy(np.stack(as_words(keys, positions)).view(np.int64))
            tokens, logprobs = self.draw(logits, *numbers.to(logits.device))
        else:
            logits = logits.float() if logits.itemsize < 4 else logits
            scores = self._adjust_logits(logits, positions, histories, responses)
            points = uniform_numbers(self.seed, keys, positions)
            tokens, logprobs = self._draw(logits, scores, points)
        return tokens.tolist(), logprobs.tolist()

    def draw(
        self, logits: Float[Tensor, "B V"], keys: Int[Tensor, " B"], positions: Int[Tensor, " B"]
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
        """Draw like `__call__`, without waiting; `logits_change_reason` must be None."""
        gpu = sampling.find_kernel(logits)
        if gpu is not None:
            return sampling.launch(logits, keys, positions, self, gpu=gpu)
        words = torch.stack([keys, positions]).cpu().numpy().view(np.uint64).tolist()
        logits = logits.float()
        return self._draw(logits, logits, uniform_numbers(self.seed, *words))

    def _draw(
        self,
        logits: Float[Tensor, "B V"],
        scores: Float[Tensor, "B V"],
        points: Float[np.ndarray, " B"],
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
        """Draw from the adjusted logits `scores`; return log-probabilities under `logits`."""
        scale = max(self.temperature or 1.0, MIN_TEMPERATURE)
        logprobs = (logits / scale if scale != 1.0 else logits).log_softmax(dim=-1)
        if self.temperature == 0:
            tokens = argmax_tokens(scores)
        else:
            probabilities = logprobs.exp() if scores is logits else (scores / scale).softmax(dim=-1)
            fractions = torch.from_numpy(points).to(logits.device)
            tokens = inverse_transform(self.truncate(probabilities), fractions)
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)

    def _adjust_logits(
        self,
        logits: Float[Tensor, "B V"],
        positions: int | Sequence[int],
        histories: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
    ) -> Float[Tensor, "B V"]:
        """Penalize repetitions, add biases and forbid stop tokens before the minimum length."""
        if self.needs_history:
            logits = apply_repetition_penalty(logits, histories, self.repetition_penalty)
        if self.counts_tokens:
            logits = apply_count_penalties(
                logits, responses, presence=self.presence_penalty, frequency=self.frequency_penalty
            )
        if self.logit_bias:
            tokens, biases = zip(*self.logit_bias, strict=True)
            values = logits.new_tensor(biases).expand(len(logits), -1)
            logits = logits.index_add(1, torch.tensor(tokens, device=logits.device), values)
        if self.forbids_early_stop:
            counts = [positions] * len(logits) if isinstance(positions, int) else positions
            early = [row for row, count in enumerate(counts) if count < self.min_new_tokens]
            if early:
                logits = logits.clone()
                logits[torch.tensor(early)[:, None], torch.tensor(self.stop_ids)] = -torch.inf
        return logits

    def truncate(self, probabilities: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Apply top-k, then top-p to the remaining tokens, then min-p, as `transformers` does."""
        if not self.truncates:
            return probabilities
        probabilities = probabilities.double()
        if self.top_k is not None:
            probabilities = keep_top_k(probabilities, self.top_k)
        probabilities = keep_top_p(probabilities, self.top_p)
        if self.min_p > 0:
            floor = self.min_p * probabilities.amax(dim=-1, keepdim=True)
            probabilities = torch.where(probabilities >= floor, probabilities, 0.0)
        return probabilities


def make_sampler(sampling: Sampling, stop_ids: Sequence[int]) -> Sampler:
    """Create a sampler with these settings."""
    settings: dict[str, Any] = asdict(sampling)
    del settings["max_new_tokens"]
    return Sampler(**settings, stop_ids=tuple(stop_ids))


def with_zero_seed(sampler: Sampler, key: int) -> tuple[Sampler, int]:
    """Return an equivalent sampler with seed 0, and the key with which it draws the same tokens.

    Rows with different seeds can then share a call: a seed only changes a word mixed into the key.
    """
    with np.errstate(over="ignore"):
        word = int((_mixed_seed(sampler.seed) ^ _mixed_seed(0))[0])
    return replace(sampler, seed=0, stop_ids=tuple(sampler.stop_ids)), key ^ word


def keep_top_k(probabilities: Float[Tensor, "B V"], top_k: int) -> Float[Tensor, "B V"]:
    """Keep the `top_k` most likely tokens, including ties with the last; renormalize to 1."""
    count = min(top_k, probabilities.shape[-1])
    threshold = probabilities.topk(count, dim=-1).values[:, -1:]
    kept = torch.where(probabilities >= threshold, probabilities, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def keep_top_p(probabilities: Float[Tensor, "B V"], top_p: float) -> Float[Tensor, "B V"]:
    """Zero all but the most likely tokens that together reach `top_p` (Holtzman et al. 2020)."""
    if top_p >= 1.0:
        return probabilities
    vocab_size = probabilities.shape[-1]
    # Tokens below this bound sum to less than half of 1 - top_p. Text usually leaves few
    # candidates, and only those are sorted.
    candidates = probabilities >= (1 - top_p) / (2 * vocab_size)
    count = int(candidates.sum(dim=-1).max())
    order = torch.arange(vocab_size, device=probabilities.device).expand_as(probabilities)
    if count <= vocab_size // 4:
        order = probabilities.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, indices = probabilities.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered * (before < top_p)
    return torch.zeros_like(probabilities).scatter(-1, order.gather(-1, indices), kept)


def inverse_transform(
    weights: Float[Tensor, "B V"], points: Float[Tensor, " B"]
) -> Int[Tensor, " B"]:
    """Return, for each row, the token at the fraction `points` of the row's cumulative weight.

    Tokens of weight 0 are never returned. In a large vocabulary, the token's block is found first,
    and then the token, in one pass over the weights.
    """
    if weights.shape[-1] <= MAX_UNBLOCKED:
        return _search(weights, points)[0]
    blocks = split_blocks(weights, padding=0.0)
    block, fraction = _search(blocks.sum(dim=-1), points)
    rows = torch.arange(len(weights), device=weights.device)
    offset, _ = _search(blocks[rows, block], fraction)
    return block * BLOCK + offset


def _search(
    weights: Float[Tensor, "B K"], points: Float[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Return the index at a fraction of the cumulative weight, and the fraction within the item."""
    cumulative = weights.double().cumsum(dim=-1)
    thresholds = points[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, thresholds, right=True)
    index = index.clamp(max=weights.shape[-1] - 1)
    weight = weights.double().gather(-1, index)
    before = cumulative.gather(-1, index) - weight
    fraction = ((thresholds - before) / weight).clamp(0.0, 1 - 2.0**-53)
    return index.squeeze(-1), fraction.squeeze(-1)


def argmax_tokens(scores: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
    """Return the index of each row's first maximum, by blocks: a full argmax is slow on CPUs."""
    blocks = split_blocks(scores, padding=-torch.inf)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    rows = torch.arange(len(scores), device=scores.device)
    return block * BLOCK + blocks[rows, block].argmax(dim=-1)


def split_blocks(values: Float[Tensor, "B V"], *, padding: float) -> Float[Tensor, "B K W"]:
    """Split each row into K blocks; the last one is padded."""
    num_padding = -values.shape[-1] % BLOCK
    padded = F.pad(values, (0, num_padding), value=padding) if num_padding else values
    return padded.unflatten(-1, (-1, BLOCK))


def apply_repetition_penalty(
    logits: Float[Tensor, "B V"], histories: Sequence[Sequence[int]], penalty: float
) -> Float[Tensor, "B V"]:
    """Lower the logits of tokens that are already in a sequence (Keskar et al. 2019, section 4.1).

    Positive logits are divided by `penalty`, and negative ones are multiplied by it.
    """
    rows = [row for row, history in enumerate(histories) for _ in history]
    tokens = [token for history in histories for token in history]
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    seen[rows, tokens] = True
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def apply_count_penalties(
    logits: Float[Tensor, "B V"],
    responses: Sequence[Sequence[int]],
    *,
    presence: float,
    frequency: float,
) -> Float[Tensor, "B V"]:
    """Apply OpenAI's presence and frequency penalties to the logits of tokens in the response.

    The logit of a token that occurs c times is lowered by `presence + c * frequency`.
    """
    rows = [row for row, response in enumerate(responses) for _ in response]
    tokens = [token for response in responses for token in response]
    counts = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    indices = torch.tensor([rows, tokens], dtype=torch.long, device=logits.device)
    ones = torch.ones(len(rows), dtype=logits.dtype, device=logits.device)
    counts.index_put_((indices[0], indices[1]), ones, accumulate=True)
    return logits - frequency * counts - presence * (counts > 0)


class TokenLogprobs(NamedTuple):
    """The policy's log-probability of a token at temperature 1, before any penalty; in nats."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens with their log-probabilities, in descending order."""


def compute_logprobs(
    logits: Float[Tensor, "B V"], tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return, for each row, the log-probabilities of its token and its `num_top` likeliest ones."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = [row[token] for row, token in zip(logprobs, tokens, strict=True)]
    values, ids = logprobs.topk(min(max(num_top, default=0), logits.shape[-1]), dim=-1)
    return [
        TokenLogprobs(logprob.item(), tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for logprob, row_ids, row_values, count in zip(
            chosen, ids.tolist(), values.tolist(), num_top, strict=True
        )
    ]
