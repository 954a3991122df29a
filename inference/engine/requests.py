"""Requests to the generation engine, their responses, and the events of generation."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from inference.engine.sampling import Sampler, TokenLogprobs, with_zero_seed

AfterToken = Callable[[int, list[int]], bool | None]
"""Called after each token with its prompt's index and the response so far; if it returns true, the
response ends."""

Reason = Literal["stop", "length", "cancelled", "error"]
"""Why a response ended: a stop token, the maximum length, a cancellation, or an error."""


@dataclass
class Response:
    """The response to one prompt."""

    ids: list[int] = field(default_factory=list)
    """Sampled tokens, including the stop token."""

    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token under the full policy at the sampling temperature (1 for greedy
    decoding), before truncation, penalties and forbidden tokens; in nats."""

    top_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities at temperature 1 for each token, if the request sets `num_top`."""

    stopped: bool = False
    """Whether a stop token, rather than the length limit or the caller, ended the response."""

    @property
    def text_ids(self) -> list[int]:
        """The tokens without the stop token; their text is the response's text."""
        return self.ids[:-1] if self.stopped else self.ids


def repeated_trigrams(ids: Sequence[int]) -> int:
    """Return the number of tokens that complete a trigram that the response already contains."""
    trigrams = list(zip(ids, ids[1:], ids[2:], strict=False))
    return len(trigrams) - len(set(trigrams))


@dataclass(frozen=True)
class Completion:
    """A response that has ended."""

    index: int
    """Index of the response's prompt."""

    prompt: tuple[int, ...]
    response: Response


@dataclass(frozen=True)
class Request:
    """A request for one response."""

    prompt: tuple[int, ...]

    sampler: Sampler
    """Sampling settings; the stop tokens end the response."""

    key: int
    """Selects the sample, together with the sampler's seed."""

    max_new_tokens: int
    """Maximum number of tokens in the response, including the stop token."""

    num_drawn: int = 0
    """Number of tokens sampled with this key in earlier turns of the dialogue; this turn's random
    numbers follow theirs."""

    num_top: int | None = None
    """If given, token events contain `TokenLogprobs` of this number of most likely tokens."""

    scope: Hashable = None
    """Only requests with the same scope share keys and values."""


def to_array(tokens: Sequence[int]) -> Int[np.ndarray, " P"]:
    """Return the tokens as an array, for fast comparisons."""
    return np.array(tokens, dtype=np.int32)


def sample_key(row: int, sample: int) -> int:
    """Return a sample's random-number key, which doesn't depend on the number of samples."""
    return sample << 40 | row


class Ticket:
    """A submitted request, and its response so far, which `OpenBatch.step` extends."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.response = Response()
        self.ended = False
        self.newest_token = request.prompt[-1]
        """The input token of the next decoding pass."""
        self.sampler, self.key = with_zero_seed(request.sampler, request.key)
        """An equivalent sampler, which requests with different seeds can share, and its key."""
        self.num_reused = 0
        """Number of prompt tokens whose keys and values were stored when a slot was assigned."""

    @cached_property
    def prompt(self) -> Int[np.ndarray, " P"]:
        """The tokens to prefill: the prompt and, after `reset_prefill`, the response so far."""
        return to_array(self.request.prompt)

    @cached_property
    def prompt_key(self) -> Hashable:
        """Key of `prompt`; tickets with equal keys need only one prefill."""
        return self.request.scope, self.request.prompt

    @property
    def tokens(self) -> list[int]:
        """Prompt and response so far."""
        return [*self.request.prompt, *self.response.ids]

    def reset_prefill(self) -> None:
        """Require another prefill of prompt and response so far, whose pages were freed."""
        self.prompt = to_array(self.tokens)
        self.prompt_key = self.request.scope, tuple(self.tokens)


Waiting = dict[Ticket, None]
"""Tickets without a slot, oldest first."""

Choice = tuple[int, float] | Exception
"""A token and its log-probability, or the reason why there is none."""


class TokenEvent(NamedTuple):
    """A token was appended to a response."""

    ticket: Ticket
    id: int
    logprob: float
    top_logprobs: TokenLogprobs | None = None
    """Log-probabilities, if the request sets `num_top`."""


class EndEvent(NamedTuple):
    """A response has ended; no other event of its ticket follows."""

    ticket: Ticket
    reason: Reason
    error: Exception | None = None


Event = TokenEvent | EndEvent
