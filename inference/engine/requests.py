"""What is asked of generation, what waits for a slot, and what comes back."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from inference.engine.sampling import Sampler, without_seed

OnToken = Callable[[int, int], None]
"""Called with a prompt's index and each token of its response."""

StopWhen = Callable[[int, list[int]], bool]
"""Whether a response ends here: called with its prompt's index and its tokens so far."""

Reason = Literal["stop", "length", "cancelled", "error"]
"""Why a response ended: at a stop token, at its longest, or as its caller or an error had it."""


@dataclass
class Response:
    """What the model generated for one prompt."""

    ids: list[int] = field(default_factory=list)
    """Sampled tokens, the stop token included."""

    logprobs: list[float] = field(default_factory=list)
    """log pi of each token under the whole policy at the sampling temperature (at temperature 1 for
    greedy decoding), before anything is truncated, penalized or forbidden; in nats."""

    stopped: bool = False
    """True where the model ended its turn itself; False where the length or the caller did."""


@dataclass(frozen=True)
class Finished:
    """A response that has ended."""

    index: int
    """Which of the given prompts it answers, counted from 0."""

    prompt: tuple[int, ...]
    response: Response


@dataclass(frozen=True)
class Request:
    """One response that is asked for."""

    prompt: tuple[int, ...]

    sampler: Sampler
    """Settings of its own; its stop tokens end the response."""

    key: int
    """Chooses the sample, with the sampler's seed."""

    max_new_tokens: int
    """Longest response, its stop token included."""

    drawn: int = 0
    """Tokens that were sampled by this key before, in an earlier turn of the same dialogue: this
    turn draws the random numbers after theirs."""

    num_top: int | None = None
    """Has each token come with `Reported`, and in it that many of the likeliest tokens."""

    scope: Hashable = None
    """Keys and values are shared by requests of the same scope and adapter alone."""

    adapter: int = 0
    """Number of the adapter that it runs through, 0 for none."""

    @property
    def sharers(self) -> Hashable:
        """What those have in common who may share keys and values."""
        return self.scope, self.adapter


def as_array(tokens: Sequence[int]) -> Int[np.ndarray, " P"]:
    """The tokens as an array, in which sequences are compared fast."""
    return np.array(tokens, dtype=np.int32)


def sample_key(row: int, sample: int) -> int:
    """What chooses a sample beside the seed; the first sample is the same however many follow."""
    return sample << 40 | row


class Ticket:
    """A request that was submitted, with its response so far.

    The response grows in `OpenBatch.step`, so other threads follow it by the events.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.response = Response()
        self.ended = False
        self.newest = 0
        """The token that is read next."""
        self.sampler, self.key = without_seed(request.sampler, request.key)
        """The same choices by a sampler that requests of other seeds share."""
        self.num_reused = 0
        """Tokens of the prompt whose keys and values were there when it got a slot."""

    @cached_property
    def prompt(self) -> Int[np.ndarray, " P"]:
        """The tokens of its prompt."""
        return as_array(self.request.prompt)

    @property
    def identity(self) -> Hashable:
        """What it has in common with tickets whose prompts are read once."""
        return self.request.sharers, self.request.prompt

    @property
    def tokens(self) -> list[int]:
        """Prompt and response so far."""
        return [*self.request.prompt, *self.response.ids]


class Reported(NamedTuple):
    """What the policy says of a token, at temperature 1, before anything is altered; in nats."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens with their log-probabilities, the likeliest first."""


Choice = tuple[int, float] | Exception
"""A token and its log-probability, or why there is none."""


class Token(NamedTuple):
    """A response has one more token."""

    ticket: Ticket
    id: int
    logprob: float
    reported: Reported | None = None
    """Where the request has `num_top`."""


class Ended(NamedTuple):
    """A response has ended; no other event of its ticket follows."""

    ticket: Ticket
    reason: Reason
    error: Exception | None = None


Event = Token | Ended


class Waiting:
    """Tickets in the order in which they came; any of them can leave."""

    def __init__(self) -> None:
        self._tickets: OrderedDict[Ticket, None] = OrderedDict()
        self._prompts: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def add(self, ticket: Ticket) -> None:
        """Put a ticket at the end of the line."""
        self._tickets[ticket] = None
        self._prompts[ticket.identity] += 1

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out of the line, wherever it stands."""
        del self._tickets[ticket]
        prompt = ticket.identity
        self._prompts[prompt] -= 1
        if not self._prompts[prompt]:
            del self._prompts[prompt]

    def oldest(self, count: int) -> list[Ticket]:
        """The first that many, or all there are."""
        return list(islice(self._tickets, count))

    def has_prompt(self, prompt: Hashable) -> bool:
        """Whether a response to the prompt of this identity is still to come."""
        return prompt in self._prompts
